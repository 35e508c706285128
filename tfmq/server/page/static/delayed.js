// Delayed messages and schedules.

import { get, post } from "./api.js";
import { bars } from "./chart.js";
import { confirm } from "./dialog.js";
import { bytes, field, figures, filter, h, hidden, link, number, pages, preview, select, state, table, time, value, visible } from "./dom.js";

const SPANS = [["auto", "as it fits"], ["hour", "an hour"], ["day", "a day"], ["week", "a week"], ["month", "30 days"], ["year", "a year"]];

function localInput(ms) {
  const at = new Date(ms - new Date(ms).getTimezoneOffset() * 60_000);
  return at.toISOString().slice(0, 19);
}

function cancel(each, page) {
  return confirm({
    title: ["Cancel the delayed message ", value(each.handle), "?"],
    facts: [
      figures([["Topic", value(`${each.topic}-${each.partition}`)], ["Key", preview(each.key, 40)], ["Due", time(each.due_ms)]]),
      h("p", {}, "It will not be delivered. That cannot be taken back."),
    ],
    button: "Cancel the message",
    async act() {
      const done = await post("delayed/cancel", { handle: each.handle });
      page.say(`The delayed message ${each.handle} is ${done.state}.`);
      page.refresh();
    },
  });
}

function reschedule(each, page) {
  return confirm({
    title: ["Reschedule the delayed message ", value(each.handle), "?"],
    facts: figures([["Topic", value(`${each.topic}-${each.partition}`)], ["Key", preview(each.key, 40)], ["Due", time(each.due_ms)]]),
    fields: [field("New time", h("input", {
      type: "datetime-local", name: "due", step: 1, required: true,
      value: localInput(Math.min(Math.max(Number(each.due_ms), Date.now()), Date.now() + 1e12)),
    }), "In your time zone. A time in the past: at once.")],
    button: "Reschedule the message",
    async act(values) {
      const done = await post("delayed/reschedule", { handle: each.handle, due_ms: Date.parse(values.due) });
      page.say(done.state === "rescheduled"
        ? `The message is rescheduled. Its handle is now ${done.handle}.` : `Nothing was changed: the message is ${done.state}.`);
      page.refresh();
    },
  });
}

export const delayed = {
  title: (params) => (params.topic ? ["Delayed messages of ", value(params.topic)] : "Delayed messages"),
  form: (params) => filter("delayed", {}, "Show",
    field("Topic", h("input", { name: "topic", value: params.topic, autocomplete: "off", spellcheck: "false" }), "Empty: all topics."),
    field("Time", select("span", SPANS, params.span ?? "auto"))),
  async load(params, page) {
    const [counts, found] = await Promise.all([
      get("delayed/histogram", { topic: params.topic, span: params.span }),
      get("delayed", { topic: params.topic, after: params.after }),
    ]);
    return [
      h("section", { "aria-label": "When they are due" },
        figures([
          ["Pending", number(counts.pending)], ["Due, not delivered yet", number(counts.overdue)],
          ["Later than the chart", number(counts.later)],
        ]),
        bars("Pending messages by the time when they are due", counts)),
      table("Delayed messages in the order of delivery", [
        { title: "Due", cell: (each) => time(each.due_ms, found.now_ms) },
        { title: "Topic", cell: (each) => each.topic ? link("topic", { name: each.topic }, value(`${each.topic}-${each.partition}`)) : "deleted" },
        { title: "Key", cell: (each) => preview(each.key, 24) },
        { title: "Size", number: true, wide: true, cell: (each) => bytes(each.size) },
        { title: "Sent", wide: true, cell: (each) => time(each.born_ms) },
        { title: "Change", cell: (each) => h("span", { class: "row-buttons" },
          h("button", { "data-key": `cancel ${each.handle}`, onclick: () => cancel(each, page) }, "Cancel", hidden(` the message ${visible(each.handle)}`), "…"),
          h("button", { "data-key": `reschedule ${each.handle}`, onclick: () => reschedule(each, page) }, "Reschedule", hidden(` the message ${visible(each.handle)}`), "…")) },
      ], found.delayed, "No delayed message is pending."),
      pages("delayed", params, found.after && { after: found.after }),
    ];
  },
};

export const schedules = {
  title: () => "Schedules",
  async load(params) {
    const found = await get("schedules", params);
    const stateOf = { active: "good", waiting: "warn" };
    return [
      table("Schedules", [
        { title: "Name", cell: (each) => value(each.name) },
        { title: "State", cell: (each) => [state(each.state, stateOf[each.state] ?? "none"), each.trouble ? h("p", {}, each.trouble) : ""] },
        { title: "Times", cell: (each) => [value(each.cron), " ", h("span", { class: "muted" }, visible(each.timezone))] },
        { title: "Next", cell: (each) => time(each.next_ms, found.now_ms) },
        { title: "Last", wide: true, cell: (each) => time(each.last_ms, found.now_ms) },
        { title: "Topic", cell: (each) => link("topic", { name: each.topic }, value(each.topic)) },
        { title: "Missed times", wide: true, cell: (each) => each.misfire },
      ], found.schedules, "There is no schedule: tfmq schedule add"),
      pages("schedules", params, found.after && { after: found.after }),
    ];
  },
};
