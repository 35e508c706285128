// The dialog that asks before something is changed.

import { ApiError } from "./api.js";
import { h } from "./dom.js";

/**
 * Ask, and call `act(values)` if the answer is yes; `values` are those of `fields`. Return what `act` returned, or null.
 * The dialog stays open with the error if `act` fails. It begins at the button that changes nothing.
 */
export function confirm({ title, facts, fields = [], button, act }) {
  return new Promise((resolve) => {
    const before = document.activeElement;
    const problem = h("p", { class: "problem", role: "alert" });
    const yes = h("button", { class: "change" }, button);
    const no = h("button", { type: "button", autofocus: fields.length === 0, onclick: () => dialog.close() }, "Do nothing");
    let result = null;
    const dialog = h("dialog", {
      "aria-labelledby": "dialog-title", "aria-describedby": "dialog-facts",
      onclose: () => {
        dialog.remove();
        before?.focus?.();
        resolve(result);
      },
    },
    h("form", {
      onsubmit: async (event) => {
        event.preventDefault();
        yes.disabled = true;
        problem.replaceChildren();
        try {
          result = await act(Object.fromEntries(new FormData(event.target)));
          dialog.close();
        } catch (error) {
          if (!(error instanceof ApiError)) throw error;
          problem.replaceChildren(error.message);
          yes.disabled = false;
        }
      },
    },
    h("h2", { id: "dialog-title" }, title),
    h("div", { id: "dialog-facts" }, facts),
    fields, problem,
    h("p", { class: "buttons" }, no, yes)));
    document.body.append(dialog);
    dialog.showModal();
  });
}
