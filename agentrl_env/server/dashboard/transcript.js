// A transcript that grows: what was said, which tools were called, what came back, what it was worth.

import { badge, count, h, number } from "./dom.js";

const FOLD_CHARACTERS = 1200;
const FOLD_LINES = 16;
const ONE_LINE = 90;
const KEPT_ENTRIES = 400;

export class TranscriptView {
  constructor() {
    this.log = h("div", { class: "log", role: "log", "aria-label": "Transcript", tabindex: "0" });
    this.jump = h("button", { type: "button", class: "jump", hidden: true }, "Jump to the newest");
    this.jump.addEventListener("click", () => this.toEnd());
    this.element = h("div", { class: "transcript" }, this.log, this.jump);
    this.turn = 0; // the last one shown
    this.log.addEventListener("scroll", () => { if (this.atEnd()) this.jump.hidden = true; });
  }

  /** Show how the session began. */
  begin(messages) {
    this.add(messages.map((message) => entry(message)));
  }

  /** Show turns; those that are shown already are passed over. */
  addTurns(turns) {
    for (const { message, result } of turns) {
      if (result.seq <= this.turn) continue;
      const missing = result.seq - this.turn - 1;
      const gap = missing ? [h("p", { class: "gap" }, `${count(missing, "turn")} no longer kept by the server`)] : [];
      const tools = new Map((message.tool_calls ?? []).map((call) => [call.id, call.function.name]));
      const answers = result.messages.map((answer) => entry(answer, tools.get(answer.tool_call_id)));
      this.turn = result.seq;
      this.add([...gap, entry(message, `turn ${result.seq}`), ...answers, outcome(result)]);
    }
  }

  add(entries) {
    const follow = this.atEnd();
    this.log.append(...entries);
    while (this.log.children.length > KEPT_ENTRIES) this.log.firstElementChild.remove();
    if (follow) this.toEnd();
    else this.jump.hidden = false;
  }

  atEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
  }

  toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
    this.jump.hidden = true;
  }
}

function entry(message, more) {
  const parts = [h("h4", {}, [message.role, message.name, more].filter(Boolean).join(" · "))];
  parts.push(...content(message.content));
  for (const call of message.tool_calls ?? []) {
    const { name, arguments: text } = call.function;
    parts.push(h("div", { class: "call" }, h("span", { class: "function" }, name), folded(pretty(text))));
  }
  return h("article", { class: `entry ${message.role}` }, parts);
}

function content(value) {
  if (value === null || value === undefined || value === "") return [];
  if (typeof value === "string") return [folded(value)];
  return value.map((part) => {
    if (part.type === "text") return folded(String(part.text));
    const url = part.image_url?.url ?? "";
    // Only a picture that is inside the message: any other address would be asked for by this page.
    if (/^data:image\//.test(url)) return h("img", { src: url, alt: "a picture in the message" });
    return folded(JSON.stringify(part, null, 2));
  });
}

/** Arguments as they read best; as the model wrote them where they are no JSON. */
function pretty(text) {
  try {
    const value = JSON.parse(text);
    // Numbers beyond double precision must show as they were written.
    if (/\d{16}/.test(text.replace(/"(?:[^"\\]|\\.)*"/g, ""))) return text;
    if (hasLines(value)) return outline(value, "").trimStart();
    const line = JSON.stringify(value, null, 1).replace(/\n\s*/g, " ");
    return line.length <= ONE_LINE ? line : JSON.stringify(value, null, 2);
  } catch {
    return text;
  }
}

/** Whether a value holds a text of several lines. */
function hasLines(value) {
  if (typeof value === "string") return value.includes("\n");
  return value !== null && typeof value === "object" && Object.values(value).some(hasLines);
}

/** A value with its texts of several lines written as such, each line of them after a bar. */
function outline(value, indent) {
  if (typeof value === "string" && value.includes("\n")) {
    return value.split("\n").map((line) => `\n${indent}│ ${line}`).join("");
  }
  if (value === null || typeof value !== "object" || !hasLines(value)) return ` ${JSON.stringify(value)}`;
  return Object.entries(value).map(([name, part]) =>
    `\n${indent}${Array.isArray(value) ? "-" : `${/^[\w-]+$/.test(name) ? name : JSON.stringify(name)}:`}` +
    outline(part, `${indent}  `)).join("");
}

/** Text, cut where it is long until someone wants to see it all. */
function folded(text) {
  const lines = text.split("\n", FOLD_LINES + 1);
  const body = h("pre", {});
  if (text.length <= FOLD_CHARACTERS && lines.length <= FOLD_LINES) {
    body.textContent = text;
    return body;
  }
  const cut = `${lines.slice(0, FOLD_LINES).join("\n").slice(0, FOLD_CHARACTERS)} …`;
  const button = h("button", { type: "button", class: "quiet", "aria-expanded": "false" });
  const show = (all) => {
    body.textContent = all ? text : cut;
    button.textContent = all ? "Show less" : `Show all ${text.length.toLocaleString("en")} characters`;
    button.setAttribute("aria-expanded", String(all));
  };
  button.addEventListener("click", () => show(button.getAttribute("aria-expanded") === "false"));
  show(false);
  return h("div", {}, body, button);
}

function outcome(result) {
  const metrics = Object.entries(result.metrics)
    .filter(([name, value]) => value !== 0 || name === "success")
    .map(([name, value]) => h("span", { class: "metric" }, `${name} ${number(value)}`));
  const reward = h("span", { class: result.reward ? "reward" : "faint" }, `reward ${number(result.reward)}`);
  const error = result.info?.error?.message;
  return h("p", { class: "outcome" },
    reward, metrics, result.status === "running" ? null : badge(result.status),
    error ? h("span", { class: "error" }, `The environment broke: ${error}`) : null);
}
