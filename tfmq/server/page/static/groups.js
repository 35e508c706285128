// Groups of consumers, and resetting their offsets.

import { get, post } from "./api.js";
import { confirm } from "./dialog.js";
import { duration, field, figures, filter, h, hidden, link, number, pages, plural, select, state, table, value } from "./dom.js";

const lag = (count) => (count === null || count < 0 ? "unknown" : number(count));
const life = (isLive) => (isLive ? state("live", "good") : state("no live member", "none"));

export const groups = {
  title: () => "Groups",
  form: (params) => filter("groups", {}, "Find groups",
    field("Name contains", h("input", { name: "contains", value: params.contains, autocomplete: "off", spellcheck: "false" }))),
  async load(params) {
    const found = await get("groups", params);
    return [
      table("Groups", [
        { title: "Name", cell: (each) => link("group", { name: each.group }, value(each.group)) },
        { title: "Lag", number: true, cell: (each) => each.error ?? lag(each.lag) },
        { title: "Members", number: true, cell: (each) => number(each.members) },
        { title: "State", cell: (each) => life(each.live) },
        { title: "Partitions", number: true, wide: true, cell: (each) => number(each.partitions) },
        { title: "Topics", wide: true, cell: (each) => (each.topics ?? []).map((name, index) => [index ? ", " : "", value(name)]) },
      ], found.groups, params.contains ? "No group has that in its name." : "There is no group yet: tfmq read TOPIC --group NAME"),
      pages("groups", params, found.after && { after: found.after }),
    ];
  },
};

const PLACES = [["earliest", "the first message"], ["latest", "the end: nothing of what is there"], ["time", "a time"], ["offset", "an offset (of one partition)"]];

function reset(group, page) {
  const place = h("input", { name: "place", autocomplete: "off", disabled: true });
  const kind = select("kind", PLACES, "earliest");
  kind.addEventListener("change", () => {
    place.disabled = kind.value === "earliest" || kind.value === "latest";
    place.type = kind.value === "time" ? "datetime-local" : "text";
    place.required = !place.disabled;
  });
  return confirm({
    title: ["Reset the group ", value(group.group), "?"],
    facts: h("p", {}, "Its consumers will read from another position: messages are read again, or never. ",
      `${group.live ? "It has a live member, so the broker will refuse this; stop its consumers first." : "It has no live member."}`),
    fields: [
      field("Topic", group.topics.length
        ? select("topic", group.topics.map((name) => [name, name]), group.topics[0])
        : h("input", { name: "topic", required: true, autocomplete: "off" })),
      field("Partition", h("input", { name: "partition", inputmode: "numeric", pattern: "[0-9]*" }), "Empty: all partitions of the topic."),
      field("Read on from", kind), field("Place", place),
    ],
    button: "Reset the group",
    async act(values) {
      const at = values.kind === "time" ? `time:${Date.parse(values.place)}` : values.kind === "offset" ? `offset:${values.place}` : values.kind;
      const given = { group: group.group, topic: values.topic, to: at };
      if (values.partition !== "") given.partition = Number(values.partition);
      const done = await post("group/reset", given);
      page.say(`The group ${group.group} was reset in ${plural(done.offsets.length, "partition")} of ${values.topic}.`);
      page.refresh();
    },
  });
}

export const group = {
  title: (params) => ["Group ", value(params.name ?? "")],
  async load(params, page) {
    const found = await get("group", params);
    return [
      figures([
        ["Lag", lag(found.lag)], ["State", life(found.live)], ["Members", number(found.members)],
        ["Strategy", found.strategy || "–"], ["Generation", number(found.generation)],
      ]),
      h("p", { class: "buttons" }, h("button", { "data-key": "reset", onclick: () => reset(found, page) }, "Reset…")),
      table("Partitions, those with the largest lag first", [
        { title: "Partition", cell: (each) => link("messages", { topic: each.topic, partition: each.partition, at: each.offset < 0 ? "earliest" : `offset:${each.offset}` },
          hidden("Messages of "), value(`${each.topic}-${each.partition}`)) },
        { title: "Lag", number: true, cell: (each) => lag(each.lag) },
        { title: "Offset", number: true, cell: (each) => each.offset < 0 ? "none" : value(each.offset) },
        { title: "End", number: true, wide: true, cell: (each) => value(each.end_offset) },
        { title: "Owner", wide: true, cell: (each) => each.member ? value(each.member) : "none" },
      ], found.offsets, "It has no offset and no partition."),
      pages("group", params, found.next && { first: found.next }),
      table("Members", [
        { title: "Client", cell: (each) => value(each.client) },
        { title: "State", cell: (each) => each.live ? state("live", "good") : state("silent", "warn") },
        { title: "Partitions", number: true, cell: (each) => number(each.partitions) },
        { title: "Last heartbeat", wide: true, cell: (each) => `${duration(each.silent_ms)} ago` },
        { title: "Note", wide: true, cell: (each) => each.note },
      ], found.member_rows, "It has no member now."),
    ];
  },
};
