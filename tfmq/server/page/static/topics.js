// Topics, their partitions, and their messages.

import { get } from "./api.js";
import {
  bytes, field, figures, filter, h, hex, hidden, link, number, pages, plural, preview, select, state, table, time, utf8,
  decoded, value, visible,
} from "./dom.js";
import { payload } from "./payload.js";

const partitionState = (word) => state(word, { open: "good", stopped: "bad", damaged: "bad" }[word]);

export const topics = {
  title: () => "Topics",
  form: (params) => filter("topics", {}, "Find topics",
    field("Name contains", h("input", { name: "contains", value: params.contains, autocomplete: "off", spellcheck: "false" }))),
  async load(params) {
    const found = await get("topics", params);
    return [
      table("Topics", [
        { title: "Name", cell: (each) => link("topic", { name: each.name }, value(each.name)) },
        { title: "Partitions", number: true, cell: (each) => number(each.partitions) },
        { title: "State", cell: (each) => each.stopped || each.damaged || each.findings
          ? state(["stopped", "damaged", "findings"].filter((kind) => each[kind]).map((kind) => `${each[kind]} ${kind}`).join(", "), "bad")
          : state("open", "good") },
        { title: "Messages", number: true, cell: (each) => number(each.messages) },
        { title: "Size", number: true, wide: true, cell: (each) => bytes(each.bytes) },
        { title: "Last append", wide: true, cell: (each) => time(each.newest_ms) },
      ], found.topics, params.contains ? "No topic has that in its name." : "There is no topic yet: tfmq send greetings hello"),
      pages("topics", params, found.after && { after: found.after }),
    ];
  },
};

export const topic = {
  title: (params) => ["Topic ", value(params.name ?? "")],
  async load(params) {
    const found = await get("topic", params);
    return [
      figures([
        ["Messages", number(found.messages)], ["Size", bytes(found.bytes)], ["Partitions", number(found.partition_count)],
        ["Look into it", h("span", {},
          link("messages", { topic: found.name, at: "latest" }, "Messages"), " · ",
          link("delayed", { topic: found.name }, "Delayed"), " · ",
          link("dead-letters", { store: found.name }, "Open as a dead-letter store"))],
      ]),
      table("Partitions", [
        { title: "Number", cell: (each) => link("messages", { topic: found.name, partition: each.partition, at: "latest" }, hidden("Partition "), each.partition) },
        { title: "State", cell: (each) => [partitionState(each.state), each.reason ? h("p", {}, each.reason) : ""] },
        { title: "Messages", number: true, cell: (each) => number(each.messages) },
        { title: "Size", number: true, cell: (each) => bytes(each.size_bytes) },
        { title: "Segments", number: true, wide: true, cell: (each) => number(each.segments) },
        { title: "Offsets", wide: true, cell: (each) => value(`${each.first_offset} – ${each.end_offset}`) },
        { title: "First append", wide: true, cell: (each) => time(each.oldest_ms) },
        { title: "Last append", wide: true, cell: (each) => time(each.newest_ms) },
      ], found.partitions, "It has no partition."),
      found.partitions.filter((each) => each.damage.length).map((each) => table(`Damaged ranges of partition ${each.partition}`, [
        { title: "From offset", cell: ([first]) => value(first) },
        { title: "To offset", cell: ([, next]) => value(next) },
        { title: "What is wrong", cell: ([, , reason]) => reason },
      ], each.damage, "")),
      found.partitions.filter((each) => each.findings.length).map((each) => table(`Findings of the verification in partition ${each.partition}`, [
        { title: "File", cell: (finding) => value(finding.file) },
        { title: "Kind", cell: (finding) => state(finding.kind, finding.kind === "index" ? "warn" : "bad") },
        { title: "From", cell: (finding) => value(finding.first) },
        { title: "To", cell: (finding) => value(finding.next) },
        { title: "What is wrong", cell: (finding) => finding.reason },
        { title: "Found", wide: true, cell: (finding) => time(finding.found_ms) },
      ], each.findings, "")),
      pages("topic", params, found.next && { first: found.next }),
      h("details", { "data-key": "settings" }, h("summary", { "data-key": "settings-summary" }, "Settings"), table("Settings of this topic", [
        { title: "Setting", cell: ([name]) => value(name) },
        { title: "Value", cell: ([, [shown]]) => value(shown) },
        { title: "From", cell: ([, [, source]]) => source },
      ], Object.entries(found.settings), "None.")),
    ];
  },
};

const PLACES = [["latest", "the last messages"], ["earliest", "the first message"], ["offset", "an offset"], ["time", "a time"], ["ordinal", "a message's number"]];

/** Return what the API calls `at` for the values of the form, and the values for the form of what it calls `at`. */
function placeOf({ from, place }) {
  if (from === "time") return place && !Number.isNaN(Date.parse(place)) ? `time:${Date.parse(place)}` : "earliest";
  if (from === "offset" || from === "ordinal") return /^\d+$/.test(place) ? `${from}:${place}` : "earliest";
  return from;
}

function formOf(at) {
  const [from, place = ""] = at.split(":");
  if (from !== "time") return { from, place };
  const local = new Date(Number(place) - new Date(Number(place)).getTimezoneOffset() * 60_000);
  return { from, place: Number.isNaN(local.getTime()) ? "" : local.toISOString().slice(0, 19) };
}

export const messages = {
  title: (params) => ["Messages of ", value(`${params.topic}-${params.partition ?? 0}`)],
  form(params) {
    const { from, place } = formOf(params.at ?? "earliest");
    const position = h("input", { name: "place", value: place, autocomplete: "off" });
    const adapt = (chosen) => {
      position.type = chosen === "time" ? "datetime-local" : "text";
      position.step = 1;
      position.inputMode = chosen === "time" ? "" : "numeric";
      position.disabled = chosen === "latest" || chosen === "earliest";
    };
    adapt(from);
    const places = select("from", PLACES, from);
    places.addEventListener("change", () => { position.value = ""; adapt(places.value); });
    return h("form", {
      class: "filter", role: "search", "aria-label": "Find messages",
      onsubmit: (event) => {
        event.preventDefault();
        const given = Object.fromEntries(new FormData(event.target));
        location.hash = link("messages", {
          topic: params.topic, partition: given.partition, at: placeOf({ place: "", ...given }), key: given.key,
        }).getAttribute("href");
      },
    },
    field("Partition", h("input", { name: "partition", value: params.partition ?? 0, inputmode: "numeric", pattern: "[0-9]+", size: 4 })),
    field("From", places), field("Place", position),
    field("Key", h("input", { name: "key", value: params.key, autocomplete: "off", spellcheck: "false" }), "Reads on until it finds the key."),
    h("button", {}, "Find messages"));
  },
  async load(params) {
    const found = await get("messages", params);
    const next = { ...params, at: `offset:${found.to}` };
    const first = found.messages[0];
    const looked = `${bytes(found.bytes_read)} were read, from offset ${found.from} to ${found.to}`;
    return [
      h("p", { class: "muted" }, link("topic", { name: found.topic }, value(found.topic)),
        ` partition ${found.partition}: offsets ${found.first_offset} to ${found.end_offset}, durable up to ${found.durable_offset}.`),
      params.key ? h("p", {}, found.at_end
        ? `${plural(found.messages.length, "message")} with this key up to the end. ${looked}.`
        : `${plural(found.messages.length, "message")} with this key so far: ${looked}; the partition goes on to ${found.durable_offset}.`) : null,
      found.damage ? h("p", { class: "finding" }, state("damaged", "bad"), ` ${found.damage.reason} `,
        link("messages", { ...params, at: `offset:${found.damage.next}` }, `Go on at offset ${found.damage.next}`)) : null,
      table("Messages", [
        { title: "Offset", cell: (each) => link("message", { topic: each.topic, partition: each.partition, offset: each.offset }, hidden("Message at "), each.offset) },
        { title: "Appended", wide: true, cell: (each) => time(each.appended_ms) },
        { title: "Key", cell: (each) => each.unreadable ? state(each.unreadable, "bad") : preview(each.key, 24) },
        { title: "Tag", wide: true, cell: (each) => each.tag ? value(each.tag) : "" },
        { title: "Payload", cell: (each) => preview(each.payload, 80) },
        { title: "Size", number: true, wide: true, cell: (each) => bytes(each.payload?.size) },
      ], found.messages, params.key ? "No message with this key was found there." : "There is no message there."),
      h("nav", { class: "pages", "aria-label": "Pages" },
        first && first.ordinal > 0 && !params.key
          ? link("messages", { ...params, at: `ordinal:${Math.max(0, first.ordinal - 50)}` }, "Earlier messages") : null,
        found.at_end ? h("span", { class: "muted" }, "This is the end of what is durable.")
          : link("messages", next, params.key ? "Look further" : "Later messages")),
    ];
  },
};

function keyFigures(shown) {
  if (!shown) return "none";
  const data = decoded(shown);
  const text = utf8(data, shown.size > data.length);
  const cut = shown.size > data.length ? ` (the first ${bytes(data.length)} of ${bytes(shown.size)})` : "";
  return [value(text === null ? hex(data) : text), shown.is_text ? cut : ` as bytes${cut}`];
}

export const message = {
  title: (params) => ["Message ", value(`${params.topic}-${params.partition ?? 0}`), " at ", visible(params.offset)],
  refreshes: false,
  async load(params) {
    const { message: each } = await get("message", params);
    return [
      figures([
        ["Topic", link("messages", { topic: each.topic, partition: each.partition, at: `offset:${each.offset}` }, value(`${each.topic}-${each.partition}`))],
        ["Offset", value(each.offset)], ["Number in its partition", number(each.ordinal)], ["Id", value(each.id)],
        ["Appended", time(each.appended_ms)], ["Created by the sender", time(each.born_ms)],
        each.unreadable ? ["Attribute", state(each.unreadable, "bad")] : ["Key", keyFigures(each.key)],
        ["Tag", each.tag ? value(each.tag) : "none"],
        each.attempts ? ["Failed calls of handlers", number(each.attempts)] : null,
        each.redrives ? ["Redriven", number(each.redrives)] : null,
      ]),
      each.properties?.length ? table("Properties", [
        { title: "Name", cell: ([name]) => value(name) },
        { title: "Value", cell: ([, content]) => value(content) },
      ], each.properties, "") : null,
      h("h2", {}, "Payload"),
      payload(each.payload),
      h("nav", { class: "pages", "aria-label": "Neighbours" },
        link("messages", { topic: each.topic, partition: each.partition, at: `offset:${each.next_offset}` }, "Later messages"),
        each.key && utf8(decoded(each.key)) ? link("messages", {
          topic: each.topic, partition: each.partition, at: "earliest", key: utf8(decoded(each.key)),
        }, "Messages with this key") : null),
    ];
  },
};
