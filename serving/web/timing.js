// Where a request's time went: the stages of its reply's Server-Timing, in microseconds.

import { counted, micros, millis, node, percent, styled, table } from "./dom.js";

const STAGES = [
  ["tokenize", "Tokenise", "text to token ids"],
  ["queue", "Queue", "waiting for an engine"],
  ["compute", "Compute", "in the engine"],
];

/** The bar, its table, and what else is known of the reply. */
export function timing({ stages, tripMs, tokens, truncated, requestId }) {
  const facts = [
    `${millis(tripMs)} in this browser, network included`,
    Number.isFinite(tokens) && tokens ? counted(tokens, "token") : null,
    truncated ? `${counted(truncated, "token")} cut off: the text is longer than the model takes` : null,
    requestId ? `request ${requestId}` : null,
  ];
  const below = node("p", { class: "faint" }, facts.filter(Boolean).join(" · "));
  if (!stages) return [below];
  const rows = parts(stages);
  const whole = rows.reduce((sum, row) => sum + row.us, 0) || 1;
  // Of several texts, queue and compute are each the longest of any: one waits while another is computed.
  const overlapping = whole > stages.total * 1.01;
  const segments = rows.map(({ name, us }) => styled(node("span", { class: `stage ${name}` }), { "flex-grow": us / whole }));
  const spoken = rows.map(({ title, us }) => `${title} ${micros(us)}`).join(", ");
  return [
    node("div", { class: "stages", role: "img", "aria-label": `Stages of the request: ${spoken}` }, ...segments),
    table(
      "Time in the server",
      ["Stage", ["Time", "number"], ["Share", "number"], ["What it is", "what"]],
      [
        ...rows.map(({ name, title, what, us }) => [
          node("span", {}, node("span", { class: `key ${name}`, "aria-hidden": "true" }), title),
          micros(us),
          percent(us / (stages.total || 1)),
          what,
        ]),
        [node("strong", {}, "Total"), node("strong", {}, micros(stages.total)), "", "from the request’s arrival to its answer"],
      ],
      "timing",
    ),
    overlapping
      ? node("p", { class: "faint" }, "Queue and compute are those of the text that took longest. Of several texts one waits while another is computed, so that the stages add up to more than the total.")
      : null,
    below,
  ].filter(Boolean);
}

/** The stages and what is left of the total: HTTP, JSON, admission, and making the answer of the outputs. */
function parts(stages) {
  const known = STAGES.map(([name, title, what]) => ({ name, title, what, us: stages[name] ?? 0 }));
  const rest = Math.max(0, stages.total - known.reduce((sum, row) => sum + row.us, 0));
  return [...known, { name: "rest", title: "Rest", what: "HTTP, JSON, admission, the way to the engine and back", us: rest }];
}
