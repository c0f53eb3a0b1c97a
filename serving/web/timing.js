// Where a request's time went: the stages of its reply's Server-Timing.

import { counted, measured, millis, node, spent, table } from "./dom.js";

const STAGES = [
  ["tokenize", "Tokenize", "text to token IDs"],
  ["queue", "Queue", "waiting for an engine"],
  ["compute", "Compute", "in the engine"],
];

/** A bar for each stage, and what else is known of the reply. */
export function timing({ stages, tripMs, tokens, truncated, cached, requestId }) {
  const facts = [
    cached ? "from the answer cache, nothing computed" : null,
    `${millis(tripMs)} in this browser, network included`,
    Number.isFinite(tokens) && tokens ? counted(tokens, "token") : null,
    truncated ? `${counted(truncated, "token")} truncated: the text exceeds the model’s limit` : null,
    requestId ? `request ${requestId}` : null,
  ];
  const below = node("p", { class: "faint" }, facts.filter(Boolean).join(" · "));
  if (!stages) return [below];
  const rows = parts(stages);
  const whole = rows.reduce((sum, row) => sum + row.us, 0);
  // Of several texts, queue and compute are each the longest of any: one waits while another is computed.
  const overlapping = whole > stages.total * 1.01;
  const share = (us) => us / (stages.total || 1);
  return [
    table(
      "Time in the server",
      ["Stage", ["Time", "number"], ["Share", "measure"], ["What it is", "what"]],
      [
        ...rows.map(({ title, what, us }) => [title, spent(us, stages.total), measured(share(us)), what]),
        [node("strong", {}, "Total"), node("strong", {}, spent(stages.total)), "", "from the request’s arrival to its answer"],
      ],
      "timing",
    ),
    overlapping
      ? node("p", { class: "faint" }, "Queue and compute times are those of the slowest text. With several texts, one waits while another is computed, so the stages can add up to more than the total.")
      : null,
    below,
  ].filter(Boolean);
}

/** The stages and what is left of the total: HTTP, JSON, admission, and making the answer of the outputs. */
function parts(stages) {
  const known = STAGES.map(([name, title, what]) => ({ title, what, us: stages[name] ?? 0 }));
  const rest = Math.max(0, stages.total - known.reduce((sum, row) => sum + row.us, 0));
  return [...known, { title: "Rest", what: "HTTP, JSON, admission, the way to the engine and back", us: rest }];
}
