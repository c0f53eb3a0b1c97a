// Answers, each drawn for what it is. Every drawing returns { summary, nodes }: a sentence and what shows it.

import { clipped, counted, measured, node, percent, signed, table } from "./dom.js";

/** A table of bars: rows are { name, share, said, cells }, `said` the bar's number, `cells` further columns. */
function bars(caption, heads, rows, measure = "Score") {
  return table(
    caption,
    [...heads.slice(0, 1), [measure, "measure"], ...heads.slice(1)],
    rows.map(({ name, share, said, cells = [] }) => [typeof name === "string" ? clipped(name) : name, measured(share, said), ...cells]),
    "bars",
  );
}

/** Classes by probability. */
export function labels([classes]) {
  const [best] = classes;
  return {
    summary: best ? `${best.label}, ${percent(best.score)}` : "The model has no classes.",
    nodes: [bars("Classes by score", ["Class"], classes.map(({ label, score }) => ({ name: label, share: score })))],
  };
}

const MAX_WEIGHTS = 24;

/** The heaviest tokens of a sparse vector. */
export function weights([found]) {
  if (!found.length) return { summary: "No token has a weight", nodes: [] };
  const heaviest = [...found].sort((one, other) => other.value - one.value).slice(0, MAX_WEIGHTS);
  const [{ token, value: most }] = heaviest;
  const rows = heaviest.map(({ token: name, value, index }) => ({ name, share: value / most, said: signed(value, 3), cells: [String(index)] }));
  const caption = found.length > rows.length ? `The heaviest ${rows.length} tokens` : "Tokens by weight";
  return {
    summary: `${counted(found.length, "token")} with a weight, the heaviest ${token}, ${signed(most, 3)}`,
    nodes: [bars(caption, ["Token", ["Index", "number"]], rows, "Weight")],
  };
}

/** A text with some of its parts marked: spans are { start, end, label, strong } in code points, in order. */
function marked(text, spans) {
  const characters = Array.from(text);
  const part = (from, to) => characters.slice(from, to).join("");
  const shown = node("p", { class: "text", tabindex: "0", role: "region", "aria-label": "The text, marked" });
  let done = 0;
  for (const { start, end, label } of spans) {
    if (start < done) continue;
    shown.append(part(done, start), node("mark", {}, part(start, end), label ? node("span", { class: "label" }, label) : null));
    done = end;
  }
  shown.append(part(done));
  return shown;
}

/** Entities in their text. */
export function entities(found, { text }) {
  const spans = found.map(({ start, end, entity_group: label }) => ({ start, end, label }));
  const rows = found.map(({ word, entity_group: label, score, start, end }) => ({
    name: word,
    share: score,
    cells: [label, `${start}–${end}`],
  }));
  return {
    summary: found.length ? `${found.length} ${found.length === 1 ? "entity" : "entities"} found` : "No entity found",
    nodes: [marked(text, spans), rows.length ? bars("Entities in the order of the text", ["Entity", "Type", ["Characters", "number"]], rows) : null],
  };
}

/** Answers to a question, the best one marked in its passage. */
export function answers(given, { passage }) {
  const found = Array.isArray(given) ? given : [given];
  const best = found[0];
  const none = !best || best.start === best.end;
  const rows = found.map(({ answer, score, start, end }) => ({
    name: start === end ? node("em", {}, "no answer in the passage") : answer,
    share: score,
    cells: [start === end ? "–" : `${start}–${end}`],
  }));
  const text = marked(passage, none ? [] : [best]);
  // Once it has its place on the page: the mark may be far down a long passage.
  requestAnimationFrame(() => text.querySelector("mark")?.scrollIntoView({ block: "nearest" }));
  return {
    summary: none ? "No answer in the passage" : `${best.answer}, ${percent(best.score)}`,
    nodes: [text, bars("Answers by score", ["Answer", ["Characters", "number"]], rows)],
  };
}

/** Documents in the order of their relevance. */
export function ranks(found, { documents }) {
  const rows = found.map(({ index, score }) => ({ name: documents[index], share: score, cells: [String(index + 1)] }));
  return {
    summary: `Best of ${counted(found.length, "document")}: line ${found[0].index + 1}, ${percent(found[0].score)}`,
    nodes: [bars("Documents by relevance", ["Document", ["Line", "number"]], rows)],
  };
}

const MASK = /\[MASK\]|<mask>/;

/** Candidates for each mask; the one chosen stands in its place. */
export function masks(found, { text }) {
  const slots = Array.isArray(found[0]) ? found : [found];
  const pieces = text.split(MASK);
  const places = slots.map(([best]) => node("mark", {}, word(best)));
  const shown = node("p", { class: "text" });
  pieces.forEach((piece, index) => {
    // What the model did not read, because the text was cut, stays as it was written.
    const place = places[index] ?? node("mark", { class: "unread" }, "[MASK]");
    shown.append(piece, index < pieces.length - 1 ? place : "");
  });
  const tables = slots.map((candidates, index) => slot(candidates, places[index], slots.length > 1 ? `Candidates for mask ${index + 1}` : "Candidates"));
  return { summary: slots.map(([best]) => `${word(best)}, ${percent(best.score)}`).join("; "), nodes: [shown, ...tables] };
}

function word({ token_str: text }) {
  return text.replace(/^##/, "").trim() || "␣";
}

function slot(candidates, place, caption) {
  const buttons = candidates.map((candidate, index) =>
    node("button", { type: "button", class: "word", "aria-pressed": String(index === 0), click: () => choose(index) }, word(candidate)),
  );
  function choose(chosen) {
    place.textContent = word(candidates[chosen]);
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(index === chosen)));
  }
  return bars(caption, ["Word"], candidates.map(({ score }, index) => ({ name: buttons[index], share: score })));
}
