// Embeddings: one vector as a profile, several as a heat map of their cosines; so are those of a text's tokens.

import { clipped, counted, drawn, node, scrolling, signed, styled, table } from "./dom.js";

const SHOWN = 8;
const MAX_TOKENS = 24;

/** What to draw of the vectors of these texts. */
export function vectors(found, { texts }) {
  return found.length === 1 ? profile(found[0]) : heatMap(found, texts);
}

/** What to draw of a text's vectors, one a token; of a long text those of its first tokens. With a query's, their products. */
export function tokens([found], _, asked) {
  if (asked) return products(asked[0], found);
  const shown = found.slice(0, MAX_TOKENS);
  const { summary, nodes } = heatMap(shown, shown.map(() => "token"));
  const all = counted(found.length, "vector");
  return { summary: found.length > shown.length ? `${all}, of which the first ${shown.length} are shown` : all, nodes: [node("p", {}, summary), ...nodes] };
}

/** Each vector of a query with each of a text: the largest products of the rows add up to MaxSim. */
function products(query, text) {
  const rows = query.map((one) => text.map((other) => dot(one, other)));
  const best = rows.map((row) => Math.max(...row));
  const cells = rows.slice(0, MAX_TOKENS).map((row, index) => [
    node("span", { class: "index" }, String(index + 1)),
    signed(best[index], 2),
    ...row.slice(0, MAX_TOKENS).map((value) => heat(value, false)),
  ]);
  const heads = ["Query", ["Best", "number"], ...text.slice(0, MAX_TOKENS).map((_, index) => [String(index + 1), "number"])];
  const map = table("Products of the vectors of query and text", heads, cells, "heat");
  return {
    summary: `MaxSim ${signed(best.reduce((sum, value) => sum + value, 0), 3)} of ${counted(query.length, "query vector")} and ${counted(text.length, "text vector")}`,
    nodes: [scrolling("Products of the vectors", map)],
  };
}

function profile(vector) {
  const largest = Math.max(...vector.map(Math.abs)) || 1;
  const bars = vector.map((value, index) => {
    const height = (Math.abs(value) / largest) * 50;
    return `M${index} 50v${(value > 0 ? -height : height).toFixed(2)}h1V50z`;
  });
  const picture = drawn(
    "svg",
    { viewBox: `0 0 ${vector.length} 100`, preserveAspectRatio: "none", class: "profile", role: "img" },
    drawn("title", {}, `Each of the ${vector.length} components as a bar, upward if positive`),
    drawn("path", { d: bars.join("") }),
  );
  const facts = table(
    "The vector in numbers",
    ["Figure", ["Value", "number"]],
    [
      ["Components", String(vector.length)],
      ["Length", signed(length(vector), 4)],
      ["Smallest", signed(Math.min(...vector), 4)],
      ["Largest", signed(Math.max(...vector), 4)],
      [`First ${SHOWN}`, vector.slice(0, SHOWN).map((value) => signed(value, 4)).join("  ")],
    ],
    "facts",
  );
  return {
    summary: `A vector of ${counted(vector.length, "component")}`,
    nodes: [picture, facts, node("p", { class: "faint" }, "Add a second text on its own line to compare the two.")],
  };
}

function heatMap(found, texts) {
  const cosines = found.map((one) => found.map((other) => cosine(one, other)));
  const pairs = cosines.flatMap((row, a) => row.slice(a + 1).map((value, offset) => ({ value, a, b: a + 1 + offset })));
  const closest = pairs.reduce((best, pair) => (pair.value > best.value ? pair : best));
  const rows = cosines.map((row, a) => [
    node("span", { class: "named" }, node("span", { class: "index" }, String(a + 1)), node("span", {}, clipped(texts[a]))),
    ...row.map((value, b) => heat(value, a === b)),
  ]);
  const map = table(
    "Cosine of each text with each other",
    ["Text", ...found.map((_, index) => [String(index + 1), "number"])],
    rows,
    "heat",
  );
  const scale = node("p", { class: "scale faint", "aria-hidden": "true" }, "0", node("span", { class: "ramp" }, ...[0, 0.25, 0.5, 0.75, 1].map((value) => styled(node("span", { class: "cell" }), { "--heat": value }))), "1");
  return {
    summary: `Closest: ${closest.a + 1} and ${closest.b + 1}, cosine ${signed(closest.value, 3)}`,
    nodes: [scrolling("Similarity of the texts", map), scale],
  };
}

function heat(value, same) {
  return styled(node("span", { class: same ? "cell same" : "cell" }, signed(value, 2)), { "--heat": same ? 0 : Math.min(1, Math.max(0, value)) });
}

function dot(one, other) {
  return one.reduce((sum, value, index) => sum + value * other[index], 0);
}

function cosine(one, other) {
  return dot(one, other) / (length(one) * length(other) || 1);
}

function length(vector) {
  return Math.hypot(...vector);
}
