// Dead letters of a store in a topic, and redriving them.

import { get, post } from "./api.js";
import { confirm } from "./dialog.js";
import { bytes, field, figures, filter, h, link, number, pages, plural, preview, select, state, table, time, value, visible } from "./dom.js";
import { payload } from "./payload.js";

const kinds = { dead: "bad", waiting: "warn", failing: "warn", retrying: "warn", redriven: "good", handled: "good" };
const wordOf = (each) => state(each.state, kinds[each.state] ?? "none");
const CHOICES = [["dead", "dead"], ["", "all"], ["waiting,failing,retrying", "not dead yet"], ["redriving", "in transit"], ["redriven,handled,dropped", "done with"]];

function summary(report) {
  const targets = report.targets.map(([topic, count]) => `${plural(count, "message")} to ${topic}`).join(", ");
  return [
    report.dry ? (targets || "Nothing would be sent.") : `${plural(report.sent, "message")} sent${targets ? `: ${targets}` : ""}.`,
    report.looping ? ` ${plural(report.looping, "message")} left out: redriven too often.` : "",
    report.foreign ? ` ${plural(report.foreign, "message")} of another broker left out.` : "",
    report.problems.length ? ` ${report.problems.join(" ")}` : "",
  ].join("");
}

async function redrive(what, chosen, page) {
  const dry = await post("dead-letters/redrive", { ...chosen, dry: true });
  return confirm({
    title: ["Redrive ", what, " of the store ", value(chosen.store), "?"],
    facts: [
      h("p", {}, summary(dry)),
      h("p", {}, "Each is sent to its topic again, once. Its consumers handle it like a new message."),
      h("p", { class: "muted" }, "One step sends at most 500; press the button again for more."),
    ],
    button: "Redrive",
    async act() {
      const done = await post("dead-letters/redrive", { ...chosen, limit: 500 });
      page.say(summary(done));
      page.refresh();
    },
  });
}

const guarded = (page, work) => async () => {
  try {
    await work();
  } catch (error) {
    page.fail(error);
  }
};

export const deadLetters = {
  title: (params) => (params.store ? ["Dead letters in ", value(params.store)] : "Dead letters"),
  form: (params) => filter("dead-letters", {}, "Show",
    field("Topic of the store", h("input", { name: "store", value: params.store, required: true, autocomplete: "off", spellcheck: "false" }), "NAME of dead_letters=\"topic:NAME\"."),
    field("Group", h("input", { name: "group", value: params.group, autocomplete: "off", spellcheck: "false" }), "Empty: all groups."),
    field("State", select("states", CHOICES, params.states ?? "dead"))),
  async load(params, page) {
    if (!params.store) {
      const reported = await get("dead-letters/groups");
      return [
        h("p", {}, "Consumers keep messages whose handling failed in a database or in a topic. Name a topic to see what is in it. ",
          "Databases are on the machines of the consumers: ", h("code", {}, "tfmq dlq list"), " shows them there."),
        table("Dead letters that consumers have reported since the start of the broker", [
          { title: "Group", cell: (each) => link("group", { name: each.group }, value(each.group)) },
          { title: "Dead letters", number: true, cell: (each) => number(each.count) },
        ], reported.groups, "No consumer has reported a dead letter since the start of the broker."),
      ];
    }
    const given = { ...params, states: params.states ?? "dead" };
    const found = await get("dead-letters", given);
    const dead = found.counts.filter(([group, word]) => word === "dead" && (!params.group || group === params.group));
    const count = dead.reduce((sum, [, , each]) => sum + each, 0);
    const chosen = { store: params.store, ...(params.group ? { group: params.group } : {}) };
    return [
      table("Dead letters by group", [
        { title: "Group", cell: ([group]) => link("dead-letters", { ...params, group, after_ms: "", after_id: "" }, value(group)) },
        { title: "State", cell: ([, word]) => wordOf({ state: word }) },
        { title: "Messages", number: true, cell: ([, , each]) => number(each) },
      ], found.counts, "The store is empty."),
      count ? h("p", { class: "buttons" }, h("button", {
        "data-key": "redrive", onclick: guarded(page, () => redrive(plural(count, "dead letter"), chosen, page)),
      }, `Redrive ${plural(count, "dead letter")}…`)) : null,
      table("Dead letters", [
        { title: "Message", cell: (each) => link("dead-letter", { store: params.store, id: each.id }, value(`${each.topic}-${each.partition} ${each.offset}`)) },
        { title: "State", cell: wordOf },
        { title: "Error", cell: (each) => visible(each.error) },
        { title: "Group", wide: true, cell: (each) => value(each.group) },
        { title: "Key", wide: true, cell: (each) => preview(each.key, 24) },
        { title: "Calls", number: true, wide: true, cell: (each) => number(each.calls) },
        { title: "Stored", wide: true, cell: (each) => time(each.kept_ms, found.now_ms) },
      ], found.letters, "None is in this state."),
      pages("dead-letters", params, found.after && { after_ms: found.after[0], after_id: found.after[1] }),
    ];
  },
};

export const deadLetter = {
  title: (params) => ["Dead letter ", value(params.id ?? "")],
  async load(params, page) {
    const { letter: each } = await get("dead-letter", params);
    return [
      figures([
        ["State", wordOf(each)], ["Group", value(each.group)],
        ["Message", link("message", { topic: each.topic, partition: each.partition, offset: each.offset }, value(`${each.topic}-${each.partition} at ${each.offset}`))],
        ["Key", preview(each.key, 80)], ["Tag", each.tag ? value(each.tag) : "none"],
        ["Calls", number(each.calls)], ["Redriven before", number(each.redrives)],
        ["Stored", time(each.kept_ms)], ["Changed", time(each.changed_ms)],
        each.sent_to ? ["Sent to", value(`${each.sent_to} at ${each.sent_offset}`)] : null,
      ]),
      ["dead", "waiting"].includes(each.state) ? h("p", { class: "buttons" }, h("button", {
        "data-key": "redrive",
        onclick: guarded(page, () => redrive(["the dead letter ", value(each.id)], { store: params.store, ids: [each.id] }, page)),
      }, "Redrive…")) : null,
      each.failure_rows.map((failure, index) => h("details", { "data-key": `failure-${index}`, open: index === each.failure_rows.length - 1 },
        h("summary", { "data-key": `failure-${index}-summary` }, time(failure.at_ms), " ", visible(failure.error)),
        h("pre", { tabindex: "0", role: "region", "aria-label": "Traceback" }, failure.traceback || "no traceback"))),
      h("h2", {}, "Payload"),
      each.has_body ? payload(each.payload) : h("p", {}, "The store has no copy of it: it was too large (", bytes(each.payload_bytes), ")."),
    ];
  },
};
