// The server, as this page knows it: JSON in, JSON and stage times out, and a key where one is wanted.

const KEY = "bertserve-key";
const PRINTABLE = /^[\x21-\x7e]+$/;
const STATUS_LIMIT_MS = 5_000;

/** The address of a path, also behind a proxy that strips a prefix. */
export const address = (path) => new URL(`..${path}`, import.meta.url).href;

/** A reply that is an error, or none at all (`status` 0). */
export class Refusal extends Error {
  constructor(message, { status = 0, title = "", reason = "", requestId = "", retryMs = null } = {}) {
    super(message);
    Object.assign(this, { status, title, reason, requestId, retryMs });
  }
}

/** The key lives as long as the tab; nothing writes it anywhere else. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
  usable: (value) => PRINTABLE.test(value),
};

/** Sends a request and returns what came back, or throws a Refusal. An abort by `signal` stays an AbortError. */
export async function ask(path, { body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (body !== undefined) sent["Content-Type"] = "application/json";
  if (key.get()) sent.Authorization = `Bearer ${key.get()}`;
  const started = performance.now();
  let reply, text;
  try {
    reply = await fetch(address(path), { method: body === undefined ? "GET" : "POST", headers: sent, body, signal });
    text = await reply.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server cannot be reached.");
  }
  const tripMs = performance.now() - started;
  if (!reply.ok) throw refusal(reply, text);
  return { json: JSON.parse(text), text, tripMs, stages: stages(reply), ...numbers(reply) };
}

/** `/status` without its cost tables, which take the server most of the time; within a few seconds. */
export async function status() {
  const limit = new AbortController();
  const timer = setTimeout(() => limit.abort(), STATUS_LIMIT_MS);
  try {
    return (await ask("/status", { headers: { Prefer: "return=minimal" }, signal: limit.signal })).json;
  } catch (error) {
    throw error.name === "AbortError" ? new Refusal("The server does not respond.") : error;
  } finally {
    clearTimeout(timer);
  }
}

/** Server-Timing in microseconds, by stage; null where the reply has none. */
function stages(reply) {
  const found = [...(reply.headers.get("Server-Timing") ?? "").matchAll(/(\w+);dur=([\d.]+)/g)];
  return found.length ? Object.fromEntries(found.map(([, name, ms]) => [name, Number(ms) * 1000])) : null;
}

function numbers(reply) {
  return {
    requestId: reply.headers.get("X-Request-Id") ?? "",
    tokens: Number(reply.headers.get("X-Compute-Tokens")),
    truncated: Number(reply.headers.get("X-Truncated-Tokens")),
    cached: reply.headers.get("X-Cache") === "hit",
  };
}

/** The server's own words, whichever protocol's shape they have. */
function refusal(reply, text) {
  let message = text, reason = "";
  try {
    const { error, error_type: type, message: plain } = JSON.parse(text);
    message = typeof error === "string" ? error : (error?.message ?? plain ?? text);
    reason = error?.reason ?? error?.code ?? type ?? "";
  } catch {
    // Not JSON: something between here and the server has answered.
  }
  const retry = reply.headers.get("Retry-After-Ms");
  return new Refusal(message || "The reply is empty.", {
    status: reply.status,
    title: reply.statusText,
    reason,
    requestId: reply.headers.get("X-Request-Id") ?? "",
    retryMs: retry === null ? null : Number(retry),
  });
}
