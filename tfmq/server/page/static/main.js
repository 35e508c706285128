// The page: which view is shown, and when it is loaded again.

import { ApiError, session } from "./api.js";
import { deadLetter, deadLetters } from "./dead_letters.js";
import { delayed, schedules } from "./delayed.js";
import { address, duration, h, visible } from "./dom.js";
import { group, groups } from "./groups.js";
import { overview, Rates, RATES_MS } from "./overview.js";
import { message, messages, topic, topics } from "./topics.js";
import { transaction, transactions } from "./transactions.js";

const REFRESH_MS = 5000;
const REFRESH_MS_MAX = 60_000;
/** After a slow load the next one waits this many times as long as it took, so that the page never is a burden. */
const REST = 10;

/** View -> its section of the navigation. A view has title(params), perhaps form(params), and load(params, page). */
const VIEWS = {
  "": [overview, ""],
  topics: [topics, "topics"], topic: [topic, "topics"], messages: [messages, "topics"], message: [message, "topics"],
  groups: [groups, "groups"], group: [group, "groups"],
  transactions: [transactions, "transactions"], transaction: [transaction, "transactions"],
  delayed: [delayed, "delayed"], schedules: [schedules, "schedules"],
  "dead-letters": [deadLetters, "dead-letters"], "dead-letter": [deadLetter, "dead-letters"],
};
const SECTIONS = [["", "Overview"], ["topics", "Topics"], ["groups", "Groups"], ["transactions", "Transactions"],
  ["delayed", "Delayed"], ["schedules", "Schedules"], ["dead-letters", "Dead letters"]];

const main = document.getElementById("main");
const status = document.getElementById("status");
const live = document.getElementById("live");
const age = document.getElementById("age");

class Page {
  constructor() {
    this.rates = new Rates();
    this.navigation = 0;
    this.loadedAt = 0;
    this.timer = 0;
    this.pause = REFRESH_MS;
    this.isFailing = false;
  }

  /** Show a view anew, as the address says. */
  async show() {
    this.navigation += 1;
    const [name, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
    this.params = Object.fromEntries(new URLSearchParams(query));
    const [view, section] = VIEWS[name] ?? VIEWS[""];
    this.view = view;
    const title = h("h1", { tabindex: "-1" }, view.title(this.params));
    document.title = `${title.textContent} · tfmq`;
    for (const each of document.querySelectorAll("#sections a")) {
      if (each.dataset.section === section) each.setAttribute("aria-current", "page");
      else each.removeAttribute("aria-current");
    }
    this.body = h("div", { id: "body", "aria-busy": "true", "data-place": location.hash }, h("p", { class: "muted" }, "Loading…"));
    main.replaceChildren(title, view.form ? view.form(this.params) : "", this.body);
    status.replaceChildren();
    if (this.navigation > 1) {
      title.focus({ preventScroll: true });
      window.scrollTo(0, 0);
    }
    await this.load();
  }

  /** Load the view's data, and show it in place of what is there. What had the focus, and what was open, stays so. */
  async load() {
    const { navigation, body } = this;
    const began = performance.now();
    clearTimeout(this.timer);
    try {
      const content = await this.view.load(this.params, this);
      if (navigation !== this.navigation) return;
      this.replace(body, content);
      this.loadedAt = Date.now();
      if (this.isFailing) this.say("The server answers again.");
      this.isFailing = false;
    } catch (error) {
      if (navigation !== this.navigation) return;
      this.fail(error);
      if (!this.loadedAt || body.getAttribute("aria-busy") === "true") {
        body.replaceChildren(h("p", { class: "problem" }, error.message));
      }
    }
    body.setAttribute("aria-busy", "false");
    this.pause = Math.min(REFRESH_MS_MAX, Math.max(REFRESH_MS, REST * (performance.now() - began)));
    this.wait();
  }

  replace(body, content) {
    const focused = body.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    const open = new Map(Array.from(body.querySelectorAll("details[data-key]"), (each) => [each.dataset.key, each.open]));
    const scrolled = new Map(Array.from(body.querySelectorAll(".scroll"), (each) => [each.dataset.key, each.scrollLeft]));
    body.replaceChildren(...[content].flat(Infinity).filter((each) => each instanceof Node));
    for (const each of body.querySelectorAll("details[data-key]")) each.open = open.get(each.dataset.key) ?? each.open;
    for (const each of body.querySelectorAll(".scroll")) each.scrollLeft = scrolled.get(each.dataset.key) ?? 0;
    if (focused !== undefined) {
      const again = Array.from(body.querySelectorAll("[data-key]")).find((each) => each.dataset.key === focused);
      (again ?? main).focus({ preventScroll: true });
    }
  }

  wait() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const isReading = String(getSelection() ?? "") !== "" || document.querySelector("dialog") !== null;
      if (live.checked && !document.hidden && !isReading && this.view.refreshes !== false) this.load();
      else this.wait();
    }, this.pause);
  }

  refresh() {
    this.load();
  }

  /** Tell people something, also those who do not see it. */
  say(sentence) {
    status.replaceChildren(visible(sentence));
  }

  fail(error) {
    if (!(error instanceof ApiError)) throw error;
    this.isFailing = error.status === 0;
    this.say(error.message);
  }

  showBroker(found) {
    document.getElementById("broker").replaceChildren(`at ${found.listen}`);
  }

  async sampleRates() {
    if (live.checked && !document.hidden) {
      try {
        await this.rates.sample();
        const shown = document.getElementById("rates");
        if (shown !== null && String(getSelection() ?? "") === "") this.replace(shown, this.rates.chart());
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
      }
    }
    setTimeout(() => this.sampleRates(), RATES_MS);
  }
}

document.getElementById("sections").replaceChildren(...SECTIONS.map(([name, text]) =>
  h("li", {}, h("a", { href: address(name), "data-section": name }, text))));
const page = new Page();
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // The address is that of the view.
  main.focus();
});
window.addEventListener("hashchange", () => page.show());
document.addEventListener("visibilitychange", () => { if (!document.hidden && live.checked) page.wait(); });
setInterval(() => {
  age.textContent = page.loadedAt ? `Loaded ${duration(Date.now() - page.loadedAt)} ago.` : "";
}, 1000);

try {
  const found = await session();
  document.getElementById("user").textContent = found.user ? `Logged in as ${visible(found.user)}.` : "";
} catch (error) {
  page.fail(error);
}
page.show();
page.sampleRates();
