// The form: a model, what its task asks for, and the answer below.

import { address, ask, Refusal } from "./api.js";
import { brief, bytes, clipped, counted, millis, node, spent } from "./dom.js";
import { documentation, entered, missing, route, taskOf } from "./tasks.js";
import { timing } from "./timing.js";

const byId = (id) => document.getElementById(id);
const RAW_LIMIT = 200_000;
const PATIENCE_MS = 400;

/** The part of the page that asks; `onKeyWanted` is called with a Refusal whose status is 401. */
export class RequestForm {
  #models = [];
  #model = null;
  #kept = {};
  #running = null;
  #onKeyWanted;

  constructor(onKeyWanted) {
    this.#onKeyWanted = onKeyWanted;
    byId("model").addEventListener("change", () => {
      history.replaceState(null, "", at(byId("model").value));
      this.#follow();
    });
    byId("request").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("request").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.send();
      }
    });
    byId("cancel").addEventListener("click", () => this.#running?.abort());
    addEventListener("hashchange", () => this.#follow());
  }

  /** The models there are now; what is chosen and typed stays where its model does. */
  offer(models) {
    const names = models.map(({ name }) => name).join("\n");
    if (names === this.#models.map(({ name }) => name).join("\n")) {
      this.#models = models;
      return;
    }
    this.#models = models;
    byId("model").replaceChildren(
      ...models.map(({ name, task }) => node("option", { value: name }, `${name} · ${taskOf(task).name}`)),
    );
    this.#follow();
  }

  /** Asks what the form says; what is under way is given up. */
  async send() {
    const task = this.#task;
    const input = entered(task, this.#values());
    const lacking = missing(task, input);
    if (lacking) {
      byId(lacking.id).focus();
      this.#say(`${lacking.label} is empty.`, "bad");
      return;
    }
    this.#running?.abort();
    const running = (this.#running = new AbortController());
    const sent = { path: this.#route, body: JSON.stringify(task.body(input)), headers: this.#headers() };
    this.#wait(running);
    const beside = task.beside?.(input);
    try {
      const [reply, other] = await Promise.all([
        ask(sent.path, { ...sent, signal: running.signal }),
        beside && ask(sent.path, { ...sent, body: JSON.stringify(beside), signal: running.signal }),
      ]);
      if (this.#running === running) this.#show(task.draw(reply.json, input, other?.json), reply, sent);
    } catch (error) {
      if (this.#running === running) this.#fail(error, sent);
    } finally {
      if (this.#running === running) {
        this.#running = null;
        byId("cancel").hidden = true;
      }
    }
  }

  get #task() {
    return taskOf(this.#model.task);
  }

  get #route() {
    return route(this.#task, this.#model.name, this.#alone);
  }

  /** Whether no other model has its task. */
  get #alone() {
    return this.#models.filter(({ task }) => task === this.#model.task).length === 1;
  }

  /** Takes the model that the address names; where there is none of that name, says so and keeps to what is shown. */
  #follow() {
    const named = new URLSearchParams(location.hash.slice(1)).get("model");
    const find = (wanted) => this.#models.find(({ name }) => name === wanted);
    const model = find(named) ?? find(this.#model?.name) ?? this.#models[0];
    if (!model) return;
    const links = this.#models.flatMap(({ name }) => [", ", node("a", { href: at(name) }, name)]).slice(1);
    const lacking = named !== null && named !== model.name;
    byId("unserved").replaceChildren(...(lacking ? [`Unknown model “${named}”. Available: `, ...links, "."] : []));
    if (named === null) history.replaceState(null, "", at(model.name));
    if (model.name === this.#model?.name) byId("model").value = model.name;
    else this.#choose(model.name);
  }

  #choose(name) {
    if (this.#model) this.#kept[this.#model.name] = this.#values();
    this.#running?.abort();
    this.#running = null;
    byId("cancel").hidden = true;
    this.#model = this.#models.find((model) => model.name === name);
    byId("model").value = name;
    const task = this.#task;
    const values = this.#kept[name] ?? task.examples[0];
    byId("fields").replaceChildren(...task.fields.map((field) => input(field, values[field.id])));
    byId("examples").replaceChildren(
      ...task.examples.map((example) => node("li", {}, node("button", { type: "button", class: "quiet", click: () => this.#try(example) }, example.name))),
    );
    byId("run").textContent = task.verb;
    byId("route").textContent = `POST ${this.#route}`;
    byId("route-docs").href = documentation(task, this.#alone);
    byId("answer").hidden = true;
    this.#say("");
  }

  #try(example) {
    for (const { id } of this.#task.fields) byId(id).value = example[id];
    this.send();
  }

  #values() {
    return Object.fromEntries(this.#task.fields.map(({ id }) => [id, byId(id).value]));
  }

  #headers() {
    const given = { "X-Request-Timeout-Ms": byId("deadline").value, "X-Request-Priority": byId("priority").value };
    return Object.fromEntries(Object.entries(given).filter(([, value]) => value));
  }

  #say(text, kind = "") {
    byId("outcome").textContent = text;
    byId("outcome").dataset.kind = kind;
  }

  /** Quick answers replace one another without a flicker; only a slow one is announced as under way. */
  #wait(running) {
    setTimeout(() => {
      if (this.#running !== running) return;
      byId("cancel").hidden = false;
      this.#say("Waiting for the answer …");
    }, PATIENCE_MS);
  }

  #show({ summary, nodes }, reply, sent) {
    this.#say(reply.stages ? `${summary}. ${spent(reply.stages.total)} in the server.` : `${summary}.`);
    byId("drawing").replaceChildren(node("p", { class: "summary" }, summary), ...nodes.filter(Boolean));
    byId("timing").replaceChildren(node("h3", {}, "Where the time went"), ...timing(reply));
    this.#trace(sent, reply);
  }

  #fail(error, sent) {
    if (error.name === "AbortError") {
      this.#say("Cancelled.");
      return;
    }
    if (!(error instanceof Refusal)) {
      this.#say("The page could not read the reply.", "bad");
      throw error;
    }
    if (error.status === 401) this.#onKeyWanted(error);
    const title = error.status ? `${error.status} ${error.title}` : "No reply";
    const facts = [
      error.reason,
      error.retryMs === null ? null : `try again in ${millis(error.retryMs)}`,
      error.requestId ? `request ${error.requestId}` : null,
    ];
    this.#say(`${title}: ${brief(error.message)}`, "bad");
    byId("drawing").replaceChildren(
      node("div", { class: "refusal" }, node("strong", { "data-kind": "bad" }, title), node("p", {}, clipped(error.message)), node("p", { class: "faint" }, facts.filter(Boolean).join(" · "))),
    );
    byId("timing").replaceChildren();
    this.#trace(sent, null);
  }

  /** The request as a command, and the reply as it came. */
  #trace(sent, reply) {
    const command = curl(sent);
    const said = node("span", { role: "status", class: "faint" });
    const shown = node("pre", { tabindex: "0", "aria-label": "The command" }, command);
    const copy = async () => {
      said.textContent = (await copied(command, shown)) ? "Copied." : "Selected: copy it with the keyboard.";
    };
    byId("trace").replaceChildren(
      node("p", { class: "copying" }, node("button", { type: "button", class: "quiet", id: "copy", click: copy }, "Copy as curl"), said),
      node("details", { id: "curl" }, node("summary", {}, "The request as curl"), shown),
    );
    if (reply) byId("trace").append(raw(reply));
    byId("answer").hidden = false;
  }
}

/** The address of a model. */
function at(name) {
  return `#model=${encodeURIComponent(name)}`;
}

function input({ id, label, hint, rows }, value) {
  return node(
    "div",
    { class: "field" },
    node("label", { for: id }, label),
    hint ? node("span", { class: "hint", id: `${id}-hint` }, hint) : null,
    node("textarea", { id, rows, spellcheck: "false", "aria-describedby": hint ? `${id}-hint` : null }, value),
  );
}

/** The reply, laid out when it is unfolded: with a line for each member, and vectors on one line. */
function raw({ json, text }) {
  const shown = node("pre", { tabindex: "0", "aria-label": "The reply" });
  const unfold = () => {
    if (shown.textContent) return;
    const whole = JSON.stringify(json, null, 2).replace(/\[\s+(-?[\d.e+-]+(?:,\s+-?[\d.e+-]+)*)\s+\]/g, (_, numbers) => `[${numbers.replace(/\s+/g, " ")}]`);
    const left = whole.length - RAW_LIMIT;
    shown.textContent = left > 0 ? `${whole.slice(0, RAW_LIMIT)}\n… ${counted(left, "character")} more` : whole;
  };
  return node("details", { id: "raw", toggle: unfold }, node("summary", {}, `The reply as JSON, ${bytes(new Blob([text]).size)}`), shown);
}

/** The same request for a shell. A key is left to the reader's environment. */
export function curl({ path, body, headers }) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [`curl ${quoted(address(path))}`, "-H 'Content-Type: application/json'"];
  for (const [name, value] of Object.entries(headers)) lines.push(`-H ${quoted(`${name}: ${value}`)}`);
  if (sessionStorage.getItem("bertserve-key")) lines.push('-H "Authorization: Bearer $BERTSERVE_KEY"');
  return [...lines, `-d ${quoted(body)}`].join(" \\\n  ");
}

/** Copies; where the browser forbids it (it does without TLS), selects what can be copied by hand. */
async function copied(text, shown) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    byId("curl").open = true;
    getSelection().selectAllChildren(shown);
    return false;
  }
}
