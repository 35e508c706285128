// Charts as SVG, each with a sentence for screen readers and its figures as a table.

import { h, number, rate, svg, table, time } from "./dom.js";

const WIDTH = 640;
const HEIGHT = 180;
const LEFT = 52;
const BOTTOM = 24;

/** Return a round number at or above `most`, with the marks of an axis up to it. */
export function axis(most) {
  if (!(most > 0)) return { end: 1, marks: [0, 1] };
  const power = 10 ** Math.floor(Math.log10(most));
  const end = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= most * 0.999);
  return { end, marks: [0, end / 2, end] };
}

function frame(label, end, marks, ...inside) {
  const y = (value) => HEIGHT - BOTTOM - (value / end) * (HEIGHT - BOTTOM - 12);
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label, class: "chart" },
    marks.map((mark) => svg("g", { class: "mark" },
      svg("line", { x1: LEFT, x2: WIDTH, y1: y(mark), y2: y(mark) }),
      svg("text", { x: LEFT - 6, y: y(mark) + 4, "text-anchor": "end" }, rate(mark)))),
    inside);
}

function asTable(summary, content) {
  return h("details", { "data-key": summary }, h("summary", { "data-key": `${summary}-summary` }, summary), content);
}

/**
 * Lines over time. `samples`: [{at_ms, NAME: value or null}]; `series`: [{key, title, kind}], `kind` is the class of the
 * line. `span_ms`: the length of the axis of time.
 */
export function lines(title, unit, samples, series, spanMs) {
  const known = samples.flatMap((sample) => series.map(({ key }) => sample[key] ?? 0));
  const { end, marks } = axis(Math.max(...known, 0));
  const last = samples.at(-1)?.at_ms ?? Date.now();
  const x = (ms) => WIDTH - ((last - ms) / spanMs) * (WIDTH - LEFT);
  const y = (value) => HEIGHT - BOTTOM - (value / end) * (HEIGHT - BOTTOM - 12);
  const paths = series.map(({ key, kind }) => {
    let isDrawing = false;
    const steps = [];
    for (const sample of samples) {
      if (sample[key] === null || last - sample.at_ms > spanMs) isDrawing = false;
      else {
        steps.push(`${isDrawing ? "L" : "M"}${x(sample.at_ms).toFixed(1)} ${y(sample[key]).toFixed(1)}`);
        isDrawing = true;
      }
    }
    return svg("path", { class: `line ${kind}`, d: steps.join("") || "M0 0" });
  });
  const now = series.map(({ key, title: name }) => `${name} ${rate(samples.at(-1)?.[key] ?? 0)}`).join(", ");
  const minutes = Math.round(spanMs / 60_000);
  const label = `${title}, ${unit}, the last ${minutes} minutes. Now: ${now}. Highest: ${rate(Math.max(...known, 0))}.`;
  const columns = [
    { title: "Time", cell: (sample) => time(sample.at_ms) },
    ...series.map(({ key, title: name }) => ({ title: name, number: true, cell: (sample) => rate(sample[key]) })),
  ];
  return h("figure", {},
    h("figcaption", {}, h("strong", {}, title), ` ${unit} `,
      h("span", { class: "legend" }, series.map(({ key, title: name, kind }) => h("span", {},
        svg("svg", { class: "key", viewBox: "0 0 24 8", "aria-hidden": "true" }, svg("path", { class: `line ${kind}`, d: "M0 4H24" })),
        ` ${name} `, h("b", {}, rate(samples.at(-1)?.[key] ?? 0)))))),
    frame(label, end, marks, paths,
      svg("text", { class: "tick", x: LEFT, y: HEIGHT - 6 }, `${minutes} min ago`),
      svg("text", { class: "tick", x: WIDTH, y: HEIGHT - 6, "text-anchor": "end" }, "now")),
    asTable(`${title} as a table`, table(`${title}, ${unit}`, columns, samples.slice(-12).reverse(), "No figures yet.")));
}

const stamps = {
  hour: { hour: "2-digit", minute: "2-digit" },
  day: { weekday: "short", hour: "2-digit", minute: "2-digit" },
  week: { weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" },
  month: { day: "numeric", month: "short" },
  year: { day: "numeric", month: "short", year: "numeric" },
};

/** Bars of a histogram over time, as /api/delayed/histogram returns it. */
export function bars(title, found) {
  const { edges, counts, span } = found;
  const { end, marks } = axis(Math.max(...counts, 0));
  const stamp = new Intl.DateTimeFormat("en-GB", stamps[span]);
  const step = (WIDTH - LEFT) / counts.length;
  const scale = (HEIGHT - BOTTOM - 12) / end;
  const text = (index) => `${stamp.format(edges[index])} to ${stamp.format(edges[index + 1])}`;
  const drawn = counts.map((count, index) => {
    const height = count ? Math.max(1, count * scale) : 0;
    return svg("rect", {
      class: "bar", x: LEFT + index * step + step * 0.08, width: step * 0.84, y: HEIGHT - BOTTOM - height, height,
    }, svg("title", {}, `${text(index)}: ${number(count)}`));
  });
  const most = counts.indexOf(Math.max(...counts));
  const label = `${title}: ${number(counts.reduce((sum, each) => sum + each, 0))} from ${stamp.format(edges[0])} to `
    + `${stamp.format(edges.at(-1))}, most from ${text(most)} (${number(counts[most])}).`;
  const rows = counts.map((count, index) => ({ count, index })).filter(({ count }) => count);
  const columns = [
    { title: "Due", cell: ({ index }) => text(index) },
    { title: "Messages", number: true, cell: ({ count }) => number(count) },
  ];
  return h("figure", {},
    h("figcaption", {}, h("strong", {}, title)),
    frame(label, end, marks, drawn,
      svg("text", { class: "tick", x: LEFT, y: HEIGHT - 6 }, stamp.format(edges[0])),
      svg("text", { class: "tick", x: WIDTH, y: HEIGHT - 6, "text-anchor": "end" }, stamp.format(edges.at(-1)))),
    asTable(`${title} as a table`, table(title, columns, rows, "No message is due in this time.")));
}
