// What each task asks for and answers. A field with `lines` is a text a line. `beside` makes a second body, if one is asked.

import { answers, entities, labels, masks, ranks, weights } from "./draw.js";
import { tokens, vectors } from "./vectors.js";

const TEXT = { id: "text", label: "Text", rows: 4 };

export const TASKS = {
  embed: {
    name: "embeddings",
    verb: "Embed",
    path: "/embed",
    docs: "TEI",
    fields: [{ id: "texts", label: "Texts", hint: "One per line. Several texts are compared with each other.", rows: 5, lines: true }],
    body: ({ texts }) => ({ inputs: texts }),
    draw: vectors,
    examples: [
      {
        name: "Five sentences",
        texts: "A man is playing a guitar.\nSomeone plays an instrument.\nThe weather will be fine tomorrow.\nIt is going to be sunny.\nThe server answers in two milliseconds.",
      },
      { name: "Question and answers", texts: "How do I reset my password?\nClick on “Forgot password” below the login form.\nOur office is closed on Sundays.\nPasswords have at least twelve characters." },
      { name: "One vector", texts: "What is a T4?" },
    ],
  },
  embed_tokens: {
    name: "embeddings of tokens",
    verb: "Embed",
    path: "/embed_all",
    docs: "TEI",
    fields: [TEXT, { id: "query", label: "Query", hint: "Optional. Shows how well the text matches it (MaxSim).", rows: 2, optional: true }],
    body: ({ text }) => ({ inputs: text }),
    beside: ({ query }) => (query.trim() ? { inputs: query, input_type: "query" } : null),
    draw: tokens,
    examples: [
      { name: "Two banks", text: "The bank of the river is far from the bank that lends money.", query: "" },
      { name: "A short one", text: "What is a T4?", query: "" },
      { name: "Query and text", text: "The T4 is a graphics card for servers.", query: "What is a T4?" },
    ],
  },
  embed_sparse: {
    name: "sparse embeddings",
    verb: "Embed",
    path: "/embed_sparse",
    docs: "TEI",
    fields: [TEXT],
    body: ({ text }) => ({ inputs: text, tokens: true }),
    draw: weights,
    examples: [
      { name: "A sentence", text: "The bank raised its interest rates for the third time this year." },
      { name: "A question", text: "What is a T4?" },
    ],
  },
  classify: {
    name: "classification",
    verb: "Classify",
    path: "/classify",
    docs: "Tasks",
    fields: [TEXT],
    body: ({ text }) => ({ inputs: text }),
    draw: labels,
    examples: [
      { name: "Praise", text: "A warm, funny and beautifully acted film that I would gladly see again." },
      { name: "Complaint", text: "It takes two hours to say what everybody knew after ten minutes." },
      { name: "Neither", text: "The film starts at eight and has an interval." },
    ],
  },
  rerank: {
    name: "reranking",
    verb: "Rank",
    path: "/rerank",
    docs: "TEI",
    fields: [
      { id: "query", label: "Query", rows: 2 },
      { id: "documents", label: "Documents", hint: "One per line.", rows: 5, lines: true },
    ],
    body: ({ query, documents }) => ({ query, texts: documents }),
    draw: ranks,
    examples: [
      {
        name: "Graphics card",
        query: "What is a T4?",
        documents: "A teapot holds about a litre.\nThe T4 is a graphics card for servers, made by Nvidia in 2018.\nModel T cars were built until 1927.\nServers with graphics cards answer faster.",
      },
      {
        name: "Help pages",
        query: "How do I cancel my subscription?",
        documents: "Invoices are sent on the first day of the month.\nUnder Settings, Plan, you can end your subscription at any time.\nWe accept cards and bank transfers.\nA plan that has ended can be taken up again within 30 days.",
      },
    ],
  },
  answer: {
    name: "question answering",
    verb: "Answer",
    path: "/answer",
    docs: "Tasks",
    fields: [
      { id: "question", label: "Question", rows: 2 },
      { id: "passage", label: "Passage", hint: "Any length: long passages are read in overlapping windows.", rows: 7 },
    ],
    body: ({ question, passage }) => ({ inputs: { question, context: passage }, parameters: { top_k: 3, handle_impossible_answer: true } }),
    draw: answers,
    examples: [
      {
        name: "The Rhine",
        question: "Where does the Rhine begin?",
        passage: "The Rhine is one of the major European rivers. It begins in the Swiss canton of Graubünden in the southeastern Swiss Alps, forms part of the borders with Liechtenstein, Austria and Germany, and flows through the Rhineland until it empties into the North Sea in the Netherlands. It is about 1,230 km long.",
      },
      {
        name: "Apollo 11",
        question: "Who stayed in orbit?",
        passage: "Apollo 11 landed on the Moon on 20 July 1969. Neil Armstrong and Buzz Aldrin walked on its surface for two and a half hours, while Michael Collins flew the command module Columbia alone in lunar orbit. They returned to Earth after more than eight days in space.",
      },
      {
        name: "Not in the text",
        question: "How many people live in Basel?",
        passage: "The Rhine is about 1,230 km long and empties into the North Sea in the Netherlands.",
      },
    ],
  },
  tag: {
    name: "entities",
    verb: "Find entities",
    path: "/tag",
    docs: "Tasks",
    fields: [TEXT],
    body: ({ text }) => ({ inputs: text }),
    draw: entities,
    examples: [
      { name: "Travel", text: "Angela Merkel met Emmanuel Macron in Paris before she flew to New York on Monday." },
      { name: "Companies", text: "Nvidia of Santa Clara announced the Tesla T4 in Tokyo, and Google offered it in its cloud." },
      { name: "Sports", text: "Roger Federer from Basel won Wimbledon eight times, the last time in London in 2017." },
    ],
  },
  fill_mask: {
    name: "masked words",
    verb: "Fill",
    path: "/fill-mask",
    docs: "Tasks",
    fields: [{ ...TEXT, hint: "Write [MASK] for each missing word." }],
    body: ({ text }) => ({ inputs: text }),
    draw: masks,
    examples: [
      { name: "One word", text: "The capital of France is [MASK]." },
      { name: "Two words", text: "A [MASK] is a piece of [MASK] that is worn on the head." },
    ],
  },
};

/** What a task asks for that has no form of its own: a text, on the route that answers as the model's task does. */
export function taskOf(name) {
  return TASKS[name] ?? { name, verb: "Ask", path: "", docs: "Tasks", fields: [TEXT], body: ({ text }) => ({ inputs: text }), draw: () => ({ summary: "Answered", nodes: [] }), examples: [{ name: "A question", text: "What is a T4?" }] };
}

/** What the fields hold, as the task's functions take it: texts, and lists of the lines that are not empty. */
export function entered(task, values) {
  const read = ({ id, lines }) => (lines ? values[id].split("\n").map((line) => line.trim()).filter(Boolean) : values[id]);
  return Object.fromEntries(task.fields.map((field) => [field.id, read(field)]));
}

/** The first field that lacks something; null where a request can be sent. */
export function missing(task, input) {
  return task.fields.find(({ id, lines, optional }) => !optional && (lines ? !input[id].length : !input[id].trim())) ?? null;
}

/** The route of a model: the plain one where it is alone, else below its name. */
export function route(task, model, alone) {
  return alone ? task.path || "/" : `/models/${encodeURIComponent(model)}${task.path}`;
}

/** Where the documentation describes that route. */
export function documentation(task, alone) {
  const name = task.path.slice(1).replace("-", "_");
  return `docs#/${task.docs}/${["post", ...(alone ? [] : ["models", "model"]), name].filter(Boolean).join("_")}`;
}
