// Nodes and numbers. Data becomes text nodes and nothing else.

const SVG = "http://www.w3.org/2000/svg";

/** An element; `properties` are attributes, or a listener where the value is a function. */
export function node(tag, properties = {}, ...children) {
  return dressed(document.createElement(tag), properties, children);
}

/** The same for an element of a drawing. */
export function drawn(tag, properties = {}, ...children) {
  return dressed(document.createElementNS(SVG, tag), properties, children);
}

function dressed(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A property of an element's style, which the page's policy allows where it forbids a style attribute. */
export function styled(element, properties) {
  for (const [name, value] of Object.entries(properties)) element.style.setProperty(name, value);
  return element;
}

/** A share of one as a bar; the number beside it says the same in words, or what else `said` is. */
export function measured(share, said = percent(share)) {
  const length = `${Math.min(1, Math.max(0, share)) * 100}%`;
  const bar = node("span", { class: "bar", "aria-hidden": "true" }, styled(node("span"), { width: length }));
  return node("span", { class: "measured" }, bar, node("span", { class: "value" }, said));
}

/** A table: `heads` are [text, class] or text, `rows` lists of text or nodes. The first column names its row. */
export function table(caption, heads, rows, kind = "") {
  const columns = heads.map((head) => (Array.isArray(head) ? head : [head, ""]));
  const cell = (value, column) =>
    node(column ? "td" : "th", { class: columns[column][1] || null, scope: column ? null : "row" }, value);
  return node(
    "table",
    { class: kind || null },
    node("caption", {}, caption),
    node("thead", {}, node("tr", {}, ...columns.map(([text, style]) => node("th", { scope: "col", class: style || null }, text)))),
    node("tbody", {}, ...rows.map((row) => node("tr", {}, ...row.map(cell)))),
  );
}

const CLIPPED = 160;

/** The beginning of a text that is long. */
export function brief(text) {
  return text.length <= CLIPPED ? text : `${Array.from(text.slice(0, 2 * CLIPPED)).slice(0, CLIPPED).join("").trimEnd()} …`;
}

/** A text of any length: of a long one the beginning, and the whole where it is asked for. */
export function clipped(text) {
  if (text.length <= CLIPPED) return text;
  const start = node("span", { class: "start" }, `${brief(text)} `);
  const all = node("span", { class: "all" }, `all ${count(Array.from(text).length)} characters`);
  return node("details", { class: "clipped" }, node("summary", {}, start, all), text);
}

/** What may be wider or higher than its place; the keyboard scrolls it too. */
export function scrolling(label, ...children) {
  return node("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": label }, ...children);
}

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A whole number with thousands set off. */
export function count(value) {
  return grouped.format(value);
}

/** "1 text", "2 texts". */
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** A duration given in microseconds; in milliseconds where the whole that it is a part of takes one or more. */
export function spent(value, whole = value) {
  return whole < 1000 ? `${Math.round(value)} µs` : `${(value / 1000).toFixed(2)} ms`;
}

/** A duration given in milliseconds, to three digits or the hundredth; in seconds from one on. */
export function millis(value) {
  if (value === null || value === undefined) return "–";
  const [number, unit] = value < 1000 ? [value, "ms"] : [value / 1000, "s"];
  return `${number.toFixed(number < 10 ? 2 : number < 100 ? 1 : 0)} ${unit}`;
}

/** A number with so many digits behind the point, and a minus as wide as a plus. */
export function signed(value, digits) {
  return value.toFixed(digits).replace("-", "−");
}

/** A text whose parts between backticks are code, begun with a capital and ended with a full stop. */
export function sentence(text) {
  const parts = `${text[0].toUpperCase()}${text.slice(1)}${/[.?!]$/.test(text) ? "" : "."}`.split("`");
  return node("span", {}, ...parts.map((part, index) => (index % 2 ? node("code", {}, part) : part)));
}

/** A rate: fractions only where it is small. */
export function rate(value) {
  if (value === 0) return "0";
  return value < 10 ? value.toFixed(value < 0.1 ? 2 : 1) : count(value);
}

/** A share as a percentage. */
export function percent(value) {
  return `${(value * 100).toFixed(1)}%`;
}

/** How long something has been going on. */
export function lasting(seconds) {
  const minutes = seconds / 60;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (minutes < 100) return `${Math.round(minutes)} min`;
  return minutes < 60 * 48 ? `${Math.round(minutes / 60)} h` : `${Math.round(minutes / 1440)} days`;
}

/** A size in bytes. */
export function bytes(value) {
  return value < 1 << 20 ? `${(value / 1024).toFixed(1)} KiB` : `${(value / (1 << 20)).toFixed(1)} MiB`;
}
