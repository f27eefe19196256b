// Be the agent: open a session, call its tools by hand, see what comes back.

import { attempt, call } from "./api.js";
import { badge, field, h, select } from "./dom.js";
import { schemaForm } from "./schema.js";
import { end, follow, showFacts } from "./session.js";
import { TranscriptView } from "./transcript.js";

const SPEAK = " "; // no tool has this name

export function playground(root, { id, query, signal }) {
  root.append(h("h2", {}, "Playground"));
  if (id) playOn(root, id, signal);
  else chooseTask(root, query.get("task"), signal);
  return "Playground";
}

async function chooseTask(root, wanted, signal) {
  const waiting = h("p", { class: "faint" }, "Loading …");
  root.append(waiting);
  let tasks;
  try {
    tasks = (await call("v1/tasks", { signal })).tasks;
  } catch (error) {
    if (!signal.aborted) waiting.textContent = error.message;
    return;
  }
  if (!tasks.length) {
    waiting.textContent = "No task is served yet.";
    return;
  }
  waiting.remove();
  const first = tasks.find(({ name }) => name === wanted) ?? tasks[0];
  const task = select(tasks.map(({ name }) => [name, name]), first.name);
  const about = h("p", { class: "description" });
  const split = h("select");
  const index = h("input", { autocomplete: "off", placeholder: "any" });
  const seed = h("input", { autocomplete: "off", inputmode: "numeric", pattern: "[0-9]*", placeholder: "any" });
  const open = h("button", { type: "submit" }, "Open a session");
  const choose = () => {
    const chosen = tasks.find(({ name }) => name === task.value);
    about.textContent = chosen.description;
    split.replaceChildren(...Object.entries(chosen.splits).map(([name, { num_samples }]) =>
      h("option", { value: name }, num_samples === null ? name : `${name} (${num_samples})`)));
  };
  task.addEventListener("change", choose);
  choose();
  const submit = async (event) => {
    event.preventDefault();
    open.disabled = true;
    const body = openBody(task.value, split.value, index.value.trim(), seed.value.trim());
    await attempt(async () => {
      const opened = await call("v1/sessions", { method: "POST", body, signal, slow: true });
      location.hash = `#/play/${encodeURIComponent(opened.session_id)}`;
    }, signal);
    open.disabled = false;
  };
  root.append(h("form", { class: "card opening", onsubmit: submit },
    field("Task", task), about,
    h("div", { class: "row" },
      field("Split", split),
      field("Index", index, "of the sample; blank: any"),
      field("Seed", seed, "blank: any")),
    h("div", { class: "buttons" }, open)));
}

/** The numbers go as they were written: JavaScript's cannot hold every seed. */
function openBody(task, split, index, seed) {
  const position = index === "" ? "null" : /^-?(0|[1-9]\d*)$/.test(index) ? index : JSON.stringify(index);
  const number = seed === "" ? "null" : /^(0|[1-9]\d*)$/.test(seed) ? seed : JSON.stringify(seed);
  return `{"task":${JSON.stringify(task)},"split":${JSON.stringify(split)},"index":${position},"seed":${number}}`;
}

function playOn(root, id, signal) {
  const view = new TranscriptView();
  const facts = h("p", { class: "facts", role: "status" }, "Loading …");
  const close = h("button", { type: "button", class: "quiet", onclick: () => end(id, close) }, "Close the session");
  const again = h("a", { class: "button", href: "#/play", hidden: true }, "Open another");
  const side = h("div", { class: "side" });
  root.append(
    h("p", {}, h("code", { class: "id" }, id)),
    h("div", { class: "controls" }, facts, h("div", { class: "buttons" }, close, again)),
    h("div", { class: "play" }, view.element, side));
  let moves = null;
  const changed = (answer) => {
    showFacts(facts, answer);
    const over = answer.status !== "running";
    close.hidden = over;
    again.hidden = !over;
    if (over) side.replaceChildren(ending(answer));
    else if (moves === null) {
      moves = movesFor(id, answer, view, signal);
      side.replaceChildren(moves.element);
    }
    again.href = `#/play?${new URLSearchParams({ task: answer.sample.task })}`;
  };
  follow(id, view, signal, changed, (error) => {
    facts.replaceChildren(error.message);
    side.replaceChildren();
    close.hidden = true;
    again.hidden = false;
  });
}

function ending({ status, turn, reward }) {
  const why = {
    completed: "The task has ended.",
    truncated_turns: "The turn limit was reached.",
    truncated_time: "The time limit was reached.",
    failed_environment: "The environment broke; the reward means nothing.",
    cancelled: "The session was closed before its end.",
    expired: "The session was idle past its lease.",
  }[status];
  return h("div", { class: "card" }, h("h3", {}, badge(status)),
    h("p", {}, `${why} ${turn === 1 ? "1 turn" : `${turn} turns`}, reward ${reward}.`));
}

/** The controls with which one move is made. */
function movesFor(id, { sample, tools }, view, signal) {
  const options = [...tools.map(({ function: { name } }) => [name, name]), [SPEAK, "say something (no tool)"]];
  const move = select(options, options[0][0]);
  const about = h("p", { class: "description" });
  const inputs = h("div");
  const raw = h("input", { type: "checkbox" });
  const rawRow = h("div", { class: "check" }, raw);
  const send = h("button", { type: "submit" }, "Call");
  raw.id = "raw-json";
  rawRow.append(h("label", { for: raw.id }, "raw JSON arguments"));
  const path = `v1/sessions/${encodeURIComponent(id)}`;
  let text = () => "";

  const chosen = () => tools.find(({ function: { name } }) => name === move.value)?.function;
  const showInputs = (given) => {
    const tool = chosen();
    about.textContent = tool ? tool.description : "An assistant message without a tool call.";
    rawRow.hidden = !tool;
    send.textContent = tool ? "Call" : "Say";
    if (tool && !raw.checked) {
      const form = schemaForm(tool.parameters);
      text = form.text;
      inputs.replaceChildren(form.element);
      return;
    }
    const area = h("textarea", { rows: "5", spellcheck: "false", class: tool ? "json" : null });
    area.value = given ?? (tool ? "{}" : "");
    text = () => area.value;
    inputs.replaceChildren(field(tool ? "Arguments" : "Text", area, tool ? "sent exactly as written" : null));
  };
  move.addEventListener("change", () => showInputs());
  raw.addEventListener("change", () => showInputs(raw.checked ? text() : undefined));

  const propose = (message) => {
    const wanted = message.tool_calls?.[0]?.function;
    move.value = wanted ? wanted.name : SPEAK;
    raw.checked = Boolean(wanted);
    showInputs(wanted ? wanted.arguments : message.content ?? "");
  };
  const busy = (on) => { send.disabled = on; form.setAttribute("aria-busy", String(on)); };
  const doing = async (work) => {
    busy(true);
    await attempt(work, signal);
    busy(false);
  };
  const step = async () => {
    const message = assistantMessage(move.value, text(), view.turn + 1);
    const body = JSON.stringify({ seq: view.turn + 1, message });
    const result = await call(`${path}/step`, { method: "POST", body, signal, slow: true });
    view.addTurns([{ message, result }]);
  };
  const form = h("form", { class: "card", onsubmit: (event) => { event.preventDefault(); doing(step); } },
    h("h3", {}, "Next move"), field("Tool", move), about, inputs, rawRow, h("div", { class: "buttons" }, send));
  showInputs();
  offer(path, sample.task, form, doing, propose, signal);
  return { element: form };
}

function assistantMessage(name, text, turn) {
  if (name === SPEAK) return { role: "assistant", content: text };
  const call = { id: `call_${turn}`, type: "function", function: { name, arguments: text } };
  return { role: "assistant", content: null, tool_calls: [call] };
}

/** Add what this task can besides: the expert's move, a fork. */
async function offer(path, name, form, doing, propose, signal) {
  let task;
  try {
    task = (await call("v1/tasks", { signal })).tasks.find((one) => one.name === name);
  } catch {
    return; // what is not known to be there is not offered
  }
  const can = task?.capabilities ?? [];
  const button = (label, work) => h("button", { type: "button", class: "quiet", onclick: () => doing(work) }, label);
  const ask = async () => propose((await call(`${path}/expert`, { method: "POST", signal, slow: true })).message);
  const fork = async () => {
    const answer = await call(`${path}/fork`, { method: "POST", body: '{"n":1}', signal, slow: true });
    location.hash = `#/play/${encodeURIComponent(answer.sessions[0].session_id)}`;
  };
  const buttons = form.querySelector(".buttons");
  if (can.includes("expert")) buttons.append(button("Ask the expert", ask));
  if (can.includes("fork")) buttons.append(button("Fork", fork));
}
