// Elements are built from nodes and text only: no data of the broker is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element. `props`: attributes; a function under "onNAME" listens for the event NAME; false leaves one out. */
export function h(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === false || value === null || value === undefined) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

// Characters that cannot be seen, or that change the order in which others are shown: they are written as escapes.
const INVISIBLE = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb]/gu;
const INVISIBLE_IN_LINES = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb]/gu;
const escape = (character) => `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`;

/** Return a text of the broker as people can read it, on one line. */
export const visible = (text) => String(text).replace(INVISIBLE, escape);
/** The same, with its line breaks and tabs. */
export const visibleLines = (text) => String(text).replace(INVISIBLE_IN_LINES, escape);

/** A name or value of the broker, in the font for values. */
export const value = (text) => h("code", { class: "value" }, visible(text));

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const number = (count) => (count === null || count === undefined ? "–" : whole.format(count));
export const rate = (count) => (count === null ? "–" : short.format(count));

export function plural(count, one, many = `${one}s`) {
  return `${number(count)} ${Number(count) === 1 ? one : many}`;
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  let left = Number(count);
  while (left >= 1000 && unit < units.length - 1) {
    left /= 1000;
    unit += 1;
  }
  return `${unit ? short.format(left) : whole.format(left)} ${units[unit]}`;
}

/** Unit, its seconds, and the seconds from which on the next unit is used. */
const UNITS = [["s", 1, 120], ["min", 60, 7200], ["h", 3600, 172_800], ["d", 86_400, Infinity]];

export function duration(ms) {
  const seconds = Math.abs(Number(ms)) / 1000;
  const [unit, length] = UNITS.find(([, , end]) => seconds < end);
  return `${whole.format(Math.floor(seconds / length))} ${unit}`;
}

const clock = new Intl.DateTimeFormat("en-GB", {
  year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit",
});

/** A time in ms since 1970, in the reader's time zone. With `now`: also how long ago, or in how long. */
export function time(ms, now) {
  const at = new Date(Number(ms));
  if (ms === null || ms === undefined || Number(ms) <= 0) return "–";
  if (Number.isNaN(at.getTime())) return `after the year 9999 (${ms} ms)`;
  const away = now === undefined ? "" : now >= ms ? ` (${duration(now - ms)} ago)` : ` (in ${duration(ms - now)})`;
  return h("time", { datetime: at.toISOString() }, clock.format(at), h("span", { class: "muted" }, away));
}

/** Decode {base64, size} of the server to bytes. */
export function decoded(shown) {
  return Uint8Array.from(atob(shown.base64), (character) => character.charCodeAt(0));
}

/** Return the bytes as text if they are UTF-8, also if they were cut off inside a character; else null. */
export function utf8(data, isCut = false) {
  for (let cut = 0; cut < (isCut ? 4 : 1); cut += 1) {
    try {
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data.subarray(0, data.length - cut));
    } catch {
      // Not UTF-8 up to here: perhaps only the last character is incomplete.
    }
  }
  return null;
}

export const hex = (data) => Array.from(data, (byte) => byte.toString(16).padStart(2, "0")).join(" ");

/** A key or payload in one line: text where it is text, else hexadecimal digits. */
export function preview(shown, most = 80) {
  if (shown === null || shown === undefined) return h("span", { class: "muted" }, "none");
  const data = decoded(shown);
  const text = utf8(data, shown.size > data.length);
  const line = text === null ? hex(data.subarray(0, most / 3)) : text;
  const isCut = line.length > most || shown.size > data.length;
  if (shown.size === 0) return h("span", { class: "muted" }, "empty");
  return h("code", { class: "value" }, visible(line.slice(0, most)), isCut ? "…" : "");
}

// Building blocks of views

/**
 * A table. `columns`: [{title, cell(row), number, wide}]; the first names its row. Columns with `wide` are left out on a
 * narrow screen. Its box can be scrolled with the keyboard.
 */
export function table(caption, columns, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const kind = (column) => [column.number && "number", column.wide && "wide"].filter(Boolean).join(" ") || false;
  const id = `caption-${caption.replaceAll(/[^a-z]+/gi, "-").toLowerCase()}`;
  return h("div", { class: "scroll", role: "region", "aria-labelledby": id, tabindex: "0", "data-key": id },
    h("table", {},
      h("caption", { id }, caption),
      h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col", class: kind(column) }, column.title)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((column, index) =>
        h(index ? "td" : "th", { class: kind(column), scope: index ? false : "row" }, column.cell(row))))))));
}

/** A list of figures: pairs of name and value. */
export function figures(pairs) {
  return h("dl", { class: "figures" }, pairs.filter(Boolean).map(([name, shown]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, shown))));
}

export const address = (view, params = {}) => {
  const known = Object.entries(params).filter(([, each]) => each !== undefined && each !== null && each !== "");
  const query = new URLSearchParams(known).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
};

export const link = (view, params, ...children) =>
  h("a", { href: address(view, params), "data-key": address(view, params) }, children);

/** Links to the first page of a list and to the one after this; nothing if there is only one page. */
export function pages(view, params, next) {
  const isFirst = !Object.keys(params).some((name) => ["after", "after_ms", "after_id", "first"].includes(name));
  if (isFirst && !next) return null;
  const start = Object.fromEntries(Object.entries(params).filter(([name]) => !/^(after|first)/.test(name)));
  return h("nav", { class: "pages", "aria-label": "Pages" },
    isFirst ? null : link(view, start, "First page"),
    next ? link(view, { ...start, ...next }, "Next page") : h("span", { class: "muted" }, "This is the last page."));
}

/** A labelled field of a form. `hint`: a sentence below it. */
export function field(label, input, hint) {
  const id = `field-${label.replaceAll(/[^a-z]+/gi, "-").toLowerCase()}`;
  input.setAttribute("id", id);
  if (hint) input.setAttribute("aria-describedby", `${id}-hint`);
  return h("div", { class: "field" }, h("label", { for: id }, label), input,
    hint && h("small", { id: `${id}-hint`, class: "muted" }, hint));
}

export const select = (name, options, chosen) =>
  h("select", { name }, options.map(([key, text]) => h("option", { value: key, selected: key === chosen }, text)));

/** A form whose values become the parameters of a view. */
export function filter(view, fixed, button, ...fields) {
  return h("form", {
    class: "filter", role: "search", "aria-label": button,
    onsubmit: (event) => {
      event.preventDefault();
      location.hash = address(view, { ...fixed, ...Object.fromEntries(new FormData(event.target)) });
    },
  }, fields, h("button", {}, button));
}

export const hidden = (text) => h("span", { class: "hidden" }, text);

/** A word about a state, with a sign, so that it does not depend on colours. */
export function state(word, kind) {
  const sign = { good: "●", warn: "▲", bad: "■" }[kind] ?? "○";
  return h("span", { class: `state ${kind}` }, h("span", { "aria-hidden": "true" }, `${sign} `), visible(word));
}
