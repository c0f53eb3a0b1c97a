// The page: polls the status, shows it, and asks for a key where the server wants one.

import { key, status } from "./api.js";
import { lasting } from "./dom.js";
import { show, state } from "./panels.js";
import { RequestForm } from "./request.js";

const EVERY_MS = 2_000;
const SLOWEST_MS = 30_000;

const byId = (id) => document.getElementById(id);
const form = new RequestForm(wanted);
let timer = 0;
let failures = 0;
let heard = 0;
let polling = false;

async function poll() {
  clearTimeout(timer);
  if (polling || document.hidden) return;
  polling = true;
  let next = EVERY_MS;
  try {
    const now = await status();
    failures = 0;
    heard = Date.now();
    arrived(now);
  } catch (error) {
    failures += 1;
    next = failed(error);
  } finally {
    polling = false;
  }
  if (next && !document.hidden) timer = setTimeout(poll, next);
}

function arrived(now) {
  byId("again").hidden = true;
  byId("nothing").hidden = true;
  byId("key-form").hidden = true;
  keyed(key.get() !== "");
  byId("main").hidden = false;
  show(now);
  form.offer(now.models);
}

/** Says what is wrong, and returns after how long to try again; 0 for not before somebody does something. */
function failed(error) {
  if (error.status === 401) {
    wanted(error);
    return 0;
  }
  const wait = Math.min(SLOWEST_MS, EVERY_MS * 2 ** (failures - 1));
  const what = error.status ? `${error.status} ${error.title}: ${error.message}` : error.message;
  const age = heard ? `The figures are ${lasting((Date.now() - heard) / 1000)} old. ` : "";
  state("bad", "not reachable", `${what} ${age}Next try in ${lasting(wait / 1000)}.`);
  byId("again").hidden = false;
  // So that many open pages do not come back in step.
  return wait * (0.9 + 0.2 * Math.random());
}

/** A server with keys wants one for its documentation too, which a link cannot bring. */
function keyed(wants) {
  byId("forget").hidden = !wants;
  for (const link of document.querySelectorAll("a.docs")) link.hidden = wants;
}

/** The server wants a key, or another one; what the last one showed is out of sight until then. */
function wanted(error) {
  clearTimeout(timer);
  const refused = key.get() !== "";
  key.forget();
  keyed(true);
  byId("forget").hidden = true;
  byId("again").hidden = true;
  byId("nothing").hidden = true;
  byId("main").hidden = true;
  state("warn", refused ? "invalid key" : "key required");
  say(`The server says: ${error.message}`, refused ? "bad" : "");
  if (byId("key-form").hidden) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
}

function say(text, kind) {
  byId("key-message").textContent = text;
  byId("key-message").dataset.kind = kind;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("key").value.trim();
  if (!key.usable(given)) {
    say("The key may contain only visible ASCII characters, no spaces.", "bad");
    return;
  }
  key.set(given);
  byId("key").value = "";
  poll();
});
byId("forget").addEventListener("click", () => {
  key.forget();
  poll();
});
byId("again").addEventListener("click", poll);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
poll();
