// The sessions, open or ended lately, in pages: thousands stay quick because a page is what is asked for.

import { call, poll } from "./api.js";
import { badge, count, duration, field, fill, h, number, reconcile, select, sessionLink, table } from "./dom.js";

const PAGE = 100;
const LIST_S = 2;
const STATUSES = [
  "running", "completed", "truncated_turns", "truncated_time", "failed_environment", "cancelled", "expired",
];

export function sessions(root, { query, signal }) {
  const filter = { task: query.get("task") ?? "", status: query.get("status") ?? "", search: query.get("search") ?? "" };
  const tasks = select([["", "all tasks"]], "");
  const named = STATUSES.map((status) => [status, status.replaceAll("_", " ")]);
  const statuses = select([["", "every status"], ...named], filter.status);
  const search = h("input", { type: "search", placeholder: "id, task, index or seed", value: filter.search });
  const rows = table("Sessions", [
    ["Session"], ["Task"], ["Status"], ["Turn", "number"], ["Reward", "number"], ["Age", "number extra"],
    ["Idle", "number extra"], ["Sample", "extra"], ["Server", "extra"],
  ]);
  const total = h("p", { class: "faint", role: "status" }, "Loading …");
  const newer = h("button", { type: "button", disabled: true }, "Newer");
  const older = h("button", { type: "button", disabled: true }, "Older");
  const pages = [null]; // where each page up to this one begins
  let next = null;
  let asked = 0;

  const load = async () => {
    const ask = ++asked;
    const wanted = { limit: PAGE, ...filter, after: pages.at(-1) };
    const given = Object.entries(wanted).filter(([, value]) => value);
    const answer = await call(`v1/sessions?${new URLSearchParams(given)}`, { signal });
    if (ask !== asked) return; // the filter or the page has changed meanwhile
    next = answer.next;
    reconcile(rows.body, answer.sessions, (row) => row.session_id, sessionCells);
    const page = pages.length > 1 || next ? `, page ${pages.length}` : "";
    const words = answer.total ? `${count(answer.total, "session")}${page}; the newest first.` : "No session.";
    if (total.textContent !== words) total.textContent = words;
    newer.disabled = pages.length === 1;
    older.disabled = next === null;
  };
  let refresh = new AbortController();
  const reload = () => {
    refresh.abort();
    refresh = new AbortController();
    poll(load, LIST_S, AbortSignal.any([signal, refresh.signal]));
  };
  const change = () => {
    Object.assign(filter, { task: tasks.value, status: statuses.value, search: search.value.trim() });
    const kept = new URLSearchParams(Object.entries(filter).filter(([, value]) => value));
    history.replaceState(null, "", `#/sessions?${kept}`);
    pages.length = 1;
    reload();
  };
  tasks.addEventListener("change", change);
  statuses.addEventListener("change", change);
  search.addEventListener("change", change);
  newer.addEventListener("click", () => { pages.pop(); reload(); });
  older.addEventListener("click", () => { pages.push(next); older.disabled = true; reload(); });
  root.append(
    h("h2", {}, "Sessions"),
    h("div", { class: "controls" },
      field("Task", tasks), field("Status", statuses), field("Search", search), h("div", { class: "buttons" }, newer, older)),
    total, rows.element,
  );
  offerTasks(tasks, filter.task, signal);
  reload();
  return "Sessions";
}

async function offerTasks(control, chosen, signal) {
  const names = new Set(chosen ? [chosen] : []);
  const show = () => fill(control, [["", "all tasks"], ...[...names].map((name) => [name, name])], chosen);
  show();
  try {
    for (const task of (await call("v1/tasks", { signal })).tasks) names.add(task.name);
    chosen = control.value;
    show();
  } catch {
    return; // the list itself says what is wrong
  }
}

function sessionCells(row) {
  const sample = [row.split, row.index, `seed ${row.seed}`].filter((part) => part !== null).join(" · ");
  const idle = row.status === "running" ? (row.idle_s === null ? "in a call" : duration(row.idle_s)) : "";
  return [
    sessionLink(row),
    h("td", { class: "wrap" }, row.task),
    h("td", {}, badge(row.status), row.error ? h("div", { class: "error wrap" }, row.error) : null),
    h("td", { class: "number" }, String(row.turn)),
    h("td", { class: "number" }, number(row.reward)),
    h("td", { class: "number extra" }, duration(row.age_s)),
    h("td", { class: "number extra" }, idle),
    h("td", { class: "extra" }, sample),
    h("td", { class: "extra" }, h("code", {}, row.server)),
  ];
}
