// A payload as text, as indented JSON, or in hexadecimal digits.

import { bytes, decoded, h, hex, utf8, visibleLines } from "./dom.js";

const LINE = 16;

function hexLines(data) {
  const rows = [];
  for (let at = 0; at < data.length; at += LINE) {
    const row = data.subarray(at, at + LINE);
    const text = Array.from(row, (byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : "·")).join("");
    rows.push(`${at.toString(16).padStart(6, "0")}  ${hex(row).padEnd(LINE * 3 - 1)}  ${text}`);
  }
  return rows.join("\n");
}

/** Return JSON with line breaks and indentation, else unchanged: parsing it would round numbers and drop repeated names. */
function indented(text) {
  try {
    const found = JSON.parse(text);
    if (typeof found !== "object" || found === null) return null;
  } catch {
    return null;
  }
  const parts = [];
  let depth = 0;
  for (const [token] of text.matchAll(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g)) {
    const isClosing = token === "}" || token === "]";
    if (isClosing) depth -= 1;
    const before = parts.at(-1);
    const isEmpty = isClosing && (before === "{" || before === "[");
    if (before !== undefined && !isEmpty && (isClosing || before === "{" || before === "[" || before === ",")) {
      parts.push(`\n${"  ".repeat(Math.min(depth, 100))}`);
    }
    parts.push(token === ":" ? ": " : token);
    if (token === "{" || token === "[") depth += 1;
  }
  return parts.join("");
}

/** Show {base64, size} of the server; the first of its forms that fits is chosen. */
export function payload(shown) {
  if (shown === null || shown === undefined) return h("p", { class: "muted" }, "It has no payload (a tombstone).");
  const data = decoded(shown);
  const isCut = shown.size > data.length;
  const text = utf8(data, isCut);
  const json = text === null || isCut ? null : indented(text);
  const forms = [
    json !== null && ["JSON", json],
    text !== null && ["Text", text],
    ["Hexadecimal", hexLines(data)],
  ].filter(Boolean);
  const box = h("pre", { tabindex: "0", role: "region", "aria-label": "Payload", "data-key": "payload" });
  const choose = (content) => box.replaceChildren(visibleLines(content));
  choose(forms[0][1]);
  return h("div", { class: "payload" },
    h("fieldset", {}, h("legend", {}, "Show the payload as"), forms.map(([name, content], index) =>
      h("label", {}, h("input", { type: "radio", name: "form", checked: index === 0, onchange: () => choose(content) }), ` ${name}`))),
    box,
    h("p", { class: "muted" }, isCut
      ? `The first ${bytes(data.length)} of ${bytes(shown.size)} are shown.`
      : `${bytes(shown.size)}, all of it is shown.`));
}
