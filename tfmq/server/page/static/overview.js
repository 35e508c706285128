// The state of the broker, and what it does now.

import { get } from "./api.js";
import { lines } from "./chart.js";
import { address, bytes, duration, figures, h, link, number, plural, state, value } from "./dom.js";

export const RATES_MS = 2000;
const SPAN_MS = 5 * 60_000;
const SAMPLES_MAX = SPAN_MS / RATES_MS + 2;
const MESSAGES = [{ key: "messages_appended", title: "appended", kind: "first" }];
const BYTES = [
  { key: "bytes_received", title: "received", kind: "first" },
  { key: "bytes_sent", title: "sent", kind: "second" },
];

/** Samples of the rates, kept while the page is open. */
export class Rates {
  constructor() {
    this.samples = [];
    this.before = null;
  }

  /** Ask for the counters, and add a sample: their growth a second since the counters before. */
  async sample() {
    const { counters, now_ms: atMs } = await get("rates");
    const { before } = this;
    const seconds = before === null ? 0 : (counters.clock_ms - before.clock_ms) / 1000;
    if (before !== null && seconds === 0) return;
    this.before = counters;
    // After a pause, or a start of the server, there is a gap in the line.
    const isNext = seconds > 0 && seconds < 30;
    const each = (key, unit) => (isNext ? Math.max(0, (counters[key] - before[key]) / seconds / unit) : null);
    this.samples.push({
      at_ms: atMs, messages_appended: each("messages_appended", 1),
      bytes_received: each("bytes_received", 1000), bytes_sent: each("bytes_sent", 1000),
    });
    this.samples = this.samples.slice(-SAMPLES_MAX);
  }

  chart() {
    return h("div", { class: "charts" },
      lines("Messages", "a second", this.samples, MESSAGES, SPAN_MS),
      lines("Clients", "kB a second", this.samples, BYTES, SPAN_MS));
  }
}

function findings(found) {
  const places = (rows) => h("ul", {}, rows.first.slice(0, 20).map((each) => h("li", {},
    link("topic", { name: each.topic }, value(`${each.topic}-${each.partition}`)),
    each.reason ? h("span", {}, " ", each.reason) : "")));
  const list = [];
  if (found.stopped.count) {
    list.push(h("div", { class: "finding" }, h("p", {},
      state("stopped", "bad"), ` ${plural(found.stopped.count, "partition")} accept no messages.`), places(found.stopped)));
  }
  if (found.damaged.count) {
    list.push(h("div", { class: "finding" }, h("p", {},
      state("damaged", "bad"), ` ${plural(found.damaged.count, "partition")} have ranges that cannot be read.`), places(found.damaged)));
  }
  const verified = Object.entries(found.verification?.findings ?? {}).filter(([, count]) => count);
  if (verified.length) {
    list.push(h("div", { class: "finding" }, h("p", {}, state("found", "bad"),
      ` The background verification found ${verified.map(([kind, count]) => `${number(count)} ${kind}`).join(", ")}: the topics name the files.`)));
  }
  if (found.transactions.alarm) {
    list.push(h("div", { class: "finding" }, h("p", {},
      state("in doubt", "warn"), " The oldest prepared transaction waits for its owner for ",
      `${duration(found.transactions.oldest_prepared_seconds * 1000)}. `, link("transactions", {}, "See the transactions"))));
  }
  for (const [name, text] of [["catalog", "The catalog"], ["transactions", "The transaction journal"], ["delay", "The log of delayed messages"]]) {
    const word = name === "catalog" ? found.catalog : name === "delay" ? found.delay.arrivals : found.transactions.journal;
    if (word && word !== "open") list.push(h("div", { class: "finding" }, h("p", {}, state("stopped", "bad"), ` ${text} accepts nothing: ${word}`)));
  }
  return list.length ? list : h("p", {}, state("in order", "good"), ": all partitions accept messages, and no damage is known.");
}

export const overview = {
  title: () => "Overview",
  async load(params, page) {
    const found = await get("overview");
    page.showBroker(found);
    return [
      h("section", { "aria-label": "Findings" }, findings(found)),
      h("section", { "aria-label": "Rates", id: "rates" }, page.rates.chart()),
      h("section", { "aria-labelledby": "figures" }, h("h2", { id: "figures" }, "What it holds"), figures([
        ["Topics", h("a", { href: address("topics"), "data-key": "topics" }, number(found.topics))],
        ["Partitions", number(found.partitions)],
        ["Messages", number(found.messages)],
        ["Size", bytes(found.bytes)],
        ["Free on the disk", bytes(found.free_bytes)],
        ["Groups", h("a", { href: address("groups"), "data-key": "groups" }, number(found.groups))],
        ["Prepared transactions", h("a", { href: address("transactions"), "data-key": "tx" }, number(found.transactions.prepared))],
        ["Open transactions", number(found.transactions.open)],
        ["Delayed messages", h("a", { href: address("delayed"), "data-key": "delayed" }, number(found.delay.pending))],
        ["Schedules", h("a", { href: address("schedules"), "data-key": "schedules" }, number(found.schedules.schedules))],
        ["Connections", number(found.connections)],
        ["Memory", bytes(found.memory_bytes)],
        ["Running for", duration(found.uptime_seconds * 1000)],
        ["Version", found.version],
      ])),
    ];
  },
};
