// Transactions that are open or in doubt, and how an operator ends them.

import { get, post } from "./api.js";
import { confirm } from "./dialog.js";
import { bytes, field, figures, filter, h, hidden, link, number, pages, plural, select, state, table, time, value } from "./dom.js";

const CHOICES = [["", "those that may need you"], ["open,preparing", "open"], ["prepared", "prepared (in doubt)"],
  ["committing,applying,rolling_back", "ending"], ["heuristic_committed,heuristic_rolled_back", "ended by an operator"]];
const kinds = { open: "none", prepared: "warn", applying: "warn", committed: "good" };
const wordOf = (each) => state(each.state.replaceAll("_", " "), kinds[each.state] ?? (each.state.startsWith("heuristic") ? "warn" : "none"));

export const transactions = {
  title: () => "Transactions",
  form: (params) => filter("transactions", {}, "Show", field("States", select("states", CHOICES, params.states ?? ""))),
  async load(params) {
    const found = await get("transactions", params);
    return [
      table("Transactions", [
        { title: "Name", cell: (each) => link("transaction", { xid: each.xid, epoch: each.epoch }, value(each.xid)) },
        { title: "State", cell: wordOf },
        { title: "Since", cell: (each) => time(each.prepared_ms || each.began_ms, found.now_ms) },
        { title: "Messages", number: true, cell: (each) => number(each.messages) },
        { title: "Size", number: true, wide: true, cell: (each) => bytes(each.bytes) },
        { title: "Topics", wide: true, cell: (each) => each.topics.map((name, index) => [index ? ", " : "", value(name)]) },
        { title: "Owner", wide: true, cell: (each) => value(each.owner) },
      ], found.transactions, "There is none."),
      pages("transactions", params, found.after && { after: found.after }),
    ];
  },
};

function end(each, how, page) {
  const verb = how === "commit" ? "Commit" : "Roll back";
  return confirm({
    title: [`${verb} the transaction `, value(each.xid), "?"],
    facts: [
      figures([
        ["Number", value(each.epoch)], ["State", each.state], ["Messages", number(each.messages)],
        ["Topics", each.topics.map((name, index) => [index ? ", " : "", value(name)])], ["Owner", value(each.owner)],
      ]),
      h("p", {}, how === "commit"
        ? "Its messages are appended, and its offsets are committed. That cannot be taken back."
        : "Its messages are discarded. That cannot be taken back."),
      h("p", {}, "This decides in place of the owner. If the owner comes back and decided otherwise, the two do not agree: ask there first."),
    ],
    button: `${verb} the transaction`,
    async act() {
      const done = await post("transaction/end", { xid: each.xid, epoch: each.epoch, end: how });
      page.say(`The transaction ${each.xid} is ${done.state.replaceAll("_", " ")}.`);
      page.refresh();
    },
  });
}

export const transaction = {
  title: (params) => ["Transaction ", value(params.xid ?? "")],
  async load(params, page) {
    const { transaction: each, now_ms: now } = await get("transaction", params);
    const canEnd = ["open", "prepared", "preparing"].includes(each.state);
    return [
      figures([
        ["State", wordOf(each)], ["Number", value(each.epoch)],
        ["Began", time(each.began_ms, now)], ["Prepared", time(each.prepared_ms, now)],
        each.decided_ms ? ["Ended", time(each.decided_ms, now)] : null,
        ["Messages", number(each.messages)], ["Size", bytes(each.bytes)], ["Batches", number(each.batches)],
        ["Owner", each.owner ? value(each.owner) : "–"], ["Producer group", each.group ? value(each.group) : "–"],
        each.commit_group ? ["Commit group", value(each.commit_group)] : null,
        each.lost ? ["Lost to damage", state(plural(each.lost, "message"), "bad")] : null,
      ]),
      each.damage ? h("p", { class: "finding" }, state("damaged", "bad"), ` ${each.damage}`) : null,
      canEnd ? h("p", { class: "buttons" },
        h("button", { "data-key": "commit", disabled: each.state === "open", onclick: () => end(each, "commit", page) }, "Commit…"),
        h("button", { "data-key": "rollback", onclick: () => end(each, "rollback", page) }, "Roll back…")) : null,
      table("Topics", [{ title: "Name", cell: (name) => link("topic", { name }, hidden("Topic "), value(name)) }], each.topics ?? [], "It names no topic."),
      each.offset_groups?.length ? table("Groups whose offsets it commits", [
        { title: "Name", cell: (name) => link("group", { name }, value(name)) }], each.offset_groups, "") : null,
    ];
  },
};

