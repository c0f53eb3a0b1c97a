// What `/status` says, in figures that are renewed in place.

import { bytes, count, counted, drawn, lasting, millis, node, percent, rate, sentence, table } from "./dom.js";
import { TASKS } from "./tasks.js";

const STATES = {
  starting: "nothing is loaded yet",
  warming: "the engine is loading and warming up; requests are rejected until it is ready",
  ready: "",
  degraded: "it serves, but on a fallback engine or from an unproven artifact",
  draining: "it finishes requests in flight and shuts down",
  stopped: "the server has stopped",
  failed: "the engine cannot start; see the server’s log",
};
const STEPS = 30;
const STAGES = ["request", "tokenize", "queue", "compute"];
const QUANTILES = ["p50_ms", "p90_ms", "p99_ms"];

const places = new Map([...document.querySelectorAll("[data-of]")].map((place) => [place.dataset.of, place]));

function set(name, text) {
  const place = places.get(name);
  if (place.textContent !== text) place.textContent = text;
}

const last = new Map();

/** Whether something is other than it was: only then it is renewed, so that it can be selected and copied. */
function changed(name, value) {
  const text = JSON.stringify(value);
  if (last.get(name) === text) return false;
  last.set(name, text);
  return true;
}

/** The state beside the name of the page: `kind` colours it. */
export function state(kind, name, more = "") {
  const place = document.getElementById("state");
  place.dataset.kind = kind;
  const shown = document.getElementById("state-name");
  if (shown.textContent !== name) shown.textContent = name;
  document.getElementById("state-more").textContent = more;
  document.title = kind === "good" ? "bertserve" : `${name} · bertserve`;
}

/** All of it. */
export function show(status) {
  const kinds = { ready: "good", failed: "bad", stopped: "bad" };
  state(kinds[status.state] ?? "warn", status.state, STATES[status.state] ?? "");
  latency(status);
  throughput(status.recent);
  queue(status);
  batches(status.batches);
  engine(status);
  since(status.totals);
  models(status.models);
  unused(status.choice);
}

function latency({ recent, totals }) {
  const asked = recent.latency.request.p50_ms !== null;
  const source = asked ? recent : totals;
  const { requests, exact } = source.latency_of;
  const window = asked ? `last ${lasting(recent.seconds)}` : "since the start";
  set("window", requests ? `${window}, ${counted(requests, "request")}` : "no request yet");
  for (const stage of STAGES) {
    for (const quantile of QUANTILES) set(`${stage}.${quantile}`, within(source.latency[stage][quantile], exact));
  }
  const highest = (value) => within(value, recent.latency_of.exact);
  steps("latency-steps", recent.steps.p99_ms, `p99 of each ${recent.steps.seconds} s`, highest);
}

/** A duration in milliseconds; of many requests only its bucket is known. */
function within(value, exact) {
  return exact || value === null ? millis(value) : `≤ ${millis(value)}`;
}

function throughput(recent) {
  set("rate-window", `last ${lasting(recent.seconds)}`);
  for (const name of ["requests_per_s", "texts_per_s", "tokens_per_s"]) set(name, rate(recent[name]));
  set("errors_per_s", `${rate(recent.errors_per_s)}/s`);
  places.get("errors_per_s").classList.toggle("alarm", recent.errors_per_s > 0);
  steps("rate-steps", recent.steps.requests_per_s, `Requests/s of each ${recent.steps.seconds} s`, rate);
}

function queue({ queue: waiting, admission, bulk }) {
  set("under-way", count(waiting.requests));
  set("waiting", waiting.texts ? `${count(waiting.texts)}, ${counted(waiting.tokens, "token")}` : "0");
  set("drain", waiting.requests ? millis(admission.drain_ms) : "–");
  set("admitted", `${count(admission.tokens)} of ${count(admission.most_tokens)} tokens`);
  set("bulk", bulk.texts ? `${count(bulk.texts)}, ${counted(bulk.tokens, "token")}` : "0");
}

function batches({ count: seen, mean_texts: texts, padding_share: padding, predicted_ms: predicted, actual_ms: actual }) {
  set("batch-window", seen ? `last ${count(seen)}` : "none yet");
  set("batch-size", seen ? texts.toFixed(1) : "–");
  set("padding", seen ? percent(padding) : "–");
  set("prediction", seen && predicted ? `${Math.round((actual / predicted) * 100)}%` : "–");
}

function engine({ engine: running, choice, lanes, totals }) {
  const where = choice.cards.length ? choice.cards.map(({ name }) => name).join(", ") : running && counted(running.threads, "thread");
  set("engine", running ? `${`${running.name} ${running.version}`.trim()}, ${where}` : "none now");
  const kinds = running?.lanes ?? [];
  const busy = lanes.map(({ tokens }, index) => `${kinds[index] ?? "lane"} ${tokens ? counted(tokens, "token") : "idle"}`);
  set("lanes", busy.join(", ") || "–");
  set("restarts", count(totals.engine_restarts));
}

function since(totals) {
  set("uptime", lasting(totals.seconds));
  const reasons = Object.entries(totals.errors).filter(([, number]) => number);
  const lines = [
    ["Requests answered", count(totals.requests)],
    ["Texts", count(totals.texts)],
    ["Tokens", count(totals.tokens)],
    ["Tokens cut off", count(totals.truncated_tokens)],
    ...reasons.map(([reason, number]) => [reason, count(number)]),
  ];
  if (!changed("since", lines)) return;
  const line = ([name, value]) => node("div", {}, node("dt", {}, name), node("dd", {}, value));
  document.getElementById("since").replaceChildren(...lines.map(line));
}

/** Bars from old to new, the newest at the right; null leaves a gap. */
function steps(id, values, what, format) {
  const picture = document.getElementById(id);
  if (!picture.childElementCount) {
    picture.setAttribute("viewBox", `0 0 ${STEPS} 20`);
    picture.setAttribute("preserveAspectRatio", "none");
    picture.append(...Array.from({ length: STEPS }, (_, index) => drawn("rect", { x: index + 0.1, width: 0.8 })));
  }
  const largest = Math.max(0, ...values.map((value) => value ?? 0));
  [...picture.children].forEach((bar, index) => {
    const value = values[index - STEPS + values.length] ?? 0;
    const height = value ? Math.max(0.8, (value / largest) * 20) : 0.25;
    bar.setAttribute("height", height);
    bar.setAttribute("y", 20 - height);
    bar.setAttribute("class", value ? "" : "none");
  });
  const highest = largest ? `highest ${format(largest)}` : "no requests";
  picture.setAttribute("aria-label", `${what} in the last minute: ${highest}`);
  set(`${id}-what`, what);
  set(`${id}-highest`, highest);
}

function models(served) {
  if (!changed("models", served.map(({ costs, ...model }) => model))) return;
  const heads = ["Model", "Task", "Artifact", "Longest input", "Compared with PyTorch", "Accuracy"];
  wide("models", "Served models, with accuracy from their export", heads, served.map(row));
}

/** What could have run the models and does not; engines with the same reason share a line. */
function unused({ rejected, left_out, lost }) {
  const found = [...rejected, ...[...left_out, ...lost].map((reason) => ({ engine: "GPU", reason }))];
  if (!changed("unused", found)) return;
  const reasons = Map.groupBy(found, ({ reason }) => reason);
  const rows = [...reasons].map(([reason, engines]) => {
    const [why, ...advice] = reason.split("; ");
    return [node("strong", {}, engines.map(({ engine }) => engine).join(", ")), sentence(why), advice.length ? sentence(advice.join("; ")) : "–"];
  });
  wide("unused", "Engines not used, and why", ["Engine", "Why", "What to do"], rows);
}

/** A table over the whole width; on a phone each row is a list with the heads as names. */
function wide(name, caption, heads, rows) {
  const made = table(caption, heads, rows, `wide ${name}`);
  for (const line of made.tBodies[0].rows) [...line.cells].forEach((cell, index) => (cell.dataset.head = heads[index]));
  document.getElementById(`${name}-table`).replaceChildren(made);
  document.getElementById(name).hidden = !rows.length;
}

function row(model) {
  const { name, version, task, source, architecture, in_service: serving } = model;
  return [
    node(
      "span",
      {},
      pair(node("strong", {}, name), `version ${version}${serving ? "" : ", out of service"}`),
      ...model.other_versions.map((other) =>
        node("span", { class: "second faint" }, `version ${other.version} ${other.state.toLowerCase()}: ${other.reason}`),
      ),
    ),
    pair(TASKS[task]?.name ?? task, architecture),
    pair(`${model.precision}, ${bytes(model.size_bytes)}`, `${model.batch_invariant ? "batched" : "one text at a time"}${libraries(model)}; from ${source}`),
    `${count(model.max_length)} tokens`,
    parity(model.parity),
    accuracy(model.accuracy),
  ];
}

/** Which library computes which lengths, where the engine has several. */
function libraries(model) {
  const steps = Object.entries(model.libraries ?? {}).filter(([, name], at, all) => name !== all[at + 1]?.[1]);
  return steps.map(([tokens, name]) => `, ${name} up to ${Math.min(tokens, model.max_length)} tokens`).join("");
}

function pair(first, second) {
  return node("span", {}, first, node("span", { class: "second faint" }, second));
}

function parity(found) {
  if (!found) return "not compared";
  const texts = `of ${counted(found.texts, "text")}`;
  if (found.agreement === null) {
    return found.cosine_mean === null
      ? pair(`differs by ${found.max_abs_difference.toPrecision(2)}`, `at most, ${texts}`)
      : pair(`cosine ${found.cosine_mean.toFixed(4)}`, `least ${found.cosine_min.toFixed(4)} ${texts}`);
  }
  return pair(`${percent(found.agreement)} agree`, texts);
}

function accuracy(measured) {
  if (!measured.length) return node("span", { class: "faint" }, "not measured");
  return node(
    "span",
    {},
    ...measured.map(({ metric, artifact, pytorch, examples, reference }) =>
      node("span", { class: "measurement" }, `${metric.replace("_", " ")} ${artifact.toFixed(2)}`, node("span", { class: "second faint" }, `PyTorch ${pytorch.toFixed(2)}; ${count(examples)} of ${reference}`)),
    ),
  );
}
