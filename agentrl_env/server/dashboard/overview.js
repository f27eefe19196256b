// The servers and their load; the tasks and their tools.

import { attempt, call, poll } from "./api.js";
import { count, duration, h, number, reconcile, sessionLink, table } from "./dom.js";
import { curves } from "./history.js";

const TASKS_S = 10;
const FAILURES_S = 10;
const FAILURES = 5;

export function overview(root, { signal, onFleet }) {
  const servers = table("Servers", [
    ["Server"], ["Load"], ["State"], ["Steps/s", "number extra"], ["Tasks", "extra"],
    ["Last sign of life", "extra"], ["Version", "extra"],
  ]);
  const summary = h("p", { class: "faint" });
  const figures = h("dl", { class: "figures", "aria-label": "Figures" });
  const tasks = h("div", { class: "cards" }, h("p", { class: "faint" }, "Loading …"));
  root.append(h("h2", {}, "Servers"), figures, curves(signal), summary, servers.element, failures(signal),
    h("h2", {}, "Tasks"), tasks);
  let latest = null;
  const showResults = () => {
    for (const line of latest ? tasks.querySelectorAll("[data-task]") : []) {
      line.replaceChildren(...entries(taskFigures(latest, line.dataset.task)));
    }
  };
  onFleet((fleet) => {
    latest = fleet;
    figures.replaceChildren(...entries(fleetFigures(fleet)));
    showResults();
    const open = fleet.servers.reduce((sum, server) => sum + server.open, 0);
    const capacity = fleet.servers.reduce((sum, server) => sum + server.capacity, 0);
    const waiting = fleet.waiting ? `, ${count(fleet.waiting, "opening")} waiting for room` : "";
    summary.textContent = fleet.servers.length
      ? `${open} of ${count(capacity, "session")} open on ${count(fleet.servers.length, "server")}${waiting}.`
      : "No server has dialled in yet.";
    const rows = [...fleet.servers, ...(fleet.lost ?? [])];
    reconcile(servers.body, rows, (server) => server.server_id, (server) =>
      server.lost_s === undefined ? serverCells(server, fleet) : lostCells(server));
  });
  let shown = "";
  poll(async () => {
    const answer = await call("v1/tasks", { signal });
    const text = JSON.stringify(answer.tasks);
    if (text !== shown) tasks.replaceChildren(...answer.tasks.map(taskCard));
    showResults();
    if (!answer.tasks.length) tasks.replaceChildren(h("p", { class: "faint" }, "No task is served yet."));
    shown = text;
  }, TASKS_S, signal);
  return "Overview";
}

/** The newest sessions that failed, with their reasons; nothing while there are none. */
function failures(signal) {
  const rows = table("Failures", [["Session"], ["Task"], ["Reason"], ["Ended", "number"]]);
  const all = h("a", { href: "#/sessions?status=failed_environment" });
  const element = h("section", { hidden: true }, h("h2", {}, "Failures"), rows.element, h("p", {}, all));
  poll(async () => {
    const wanted = new URLSearchParams({ status: "failed_environment", limit: FAILURES });
    const { sessions, total } = await call(`v1/sessions?${wanted}`, { signal });
    element.hidden = total === 0;
    all.textContent = `All ${count(total, "session")} that failed`;
    reconcile(rows.body, sessions, (row) => row.session_id, failureCells);
  }, FAILURES_S, signal);
  return element;
}

function failureCells(row) {
  return [
    sessionLink(row),
    h("td", { class: "wrap" }, row.task),
    h("td", {}, h("div", { class: "error wrap" }, row.error || "no reason is known")),
    h("td", { class: "number" }, `${duration(row.idle_s)} ago`),
  ];
}

/** Sums over tasks. */
function sum(fleet, name) {
  return Object.values(fleet.counts ?? {}).reduce((total, task) => total + task[name], 0);
}

function broken(task) {
  return (task.ended.failed_environment ?? 0) + (task.ended.session_lost ?? 0);
}

function fleetFigures(fleet) {
  const failed = Object.values(fleet.counts ?? {}).reduce((n, task) => n + broken(task), 0);
  return [
    ["Steps/s", perSecond(fleet.rate((one) => sum(one, "steps")))],
    ["Episodes", sum(fleet, "scored").toLocaleString("en")],
    ["Success", share(sum(fleet, "succeeded"), sum(fleet, "scored"))],
    ["Broken", failed.toLocaleString("en")],
    ["Servers lost", String((fleet.lost ?? []).length)],
  ];
}

function taskFigures(fleet, name) {
  const counts = Object.hasOwn(fleet.counts ?? {}, name) ? fleet.counts[name] : null;
  if (!counts) return [["Success", "no step yet"]];
  const mean = counts.scored ? number(counts.reward / counts.scored) : "–";
  return [
    ["Success", share(counts.succeeded, counts.scored)],
    ["Mean reward", mean],
    ["Episodes", counts.scored.toLocaleString("en")],
    ["Steps/s", perSecond(fleet.rate((one) => one.counts?.[name]?.steps))],
    ...(broken(counts) ? [["Broken", broken(counts).toLocaleString("en")]] : []),
  ];
}

function entries(figures) {
  return figures.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
}

function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(part && part < whole ? 1 : 0)} %` : "–";
}

function perSecond(value) {
  return value === null ? "…" : value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

function tasksOf(server) {
  const text = server.tasks.length > 4
    ? `${server.tasks.slice(0, 3).join(", ")} and ${server.tasks.length - 3} more` : server.tasks.join(", ");
  return h("td", { class: "extra wrap", title: server.tasks.join(", ") }, text);
}

/** Host and process, by which people know a server, and the beginning of its id. */
function nameOf({ place, server_id: id }) {
  return h("th", { scope: "row", title: id }, place || id.slice(0, 8),
    h("div", { class: "faint" }, h("code", {}, id.slice(0, 8))));
}

/** Keep new sessions away from a server, or let them in again. */
function drainButton({ server_id: id, place, stale }) {
  const words = stale ? "Resume" : "Drain";
  const button = h("button", { type: "button", class: "quiet small", "aria-label": `${words} ${place || id}` }, words);
  button.addEventListener("click", () => attempt(() => call("v1/fleet/drain", {
    method: "POST", body: JSON.stringify({ server_id: id, draining: !stale }),
  })));
  return button;
}

/** A lost server, which stays in sight for some minutes. */
function lostCells(server) {
  return [
    nameOf(server),
    h("td", {}, `${count(server.open, "session")} at its loss`),
    h("td", {}, h("span", { class: "badge failed_environment" }, "lost"),
      h("div", { class: "faint" }, `${duration(server.lost_s)} ago: ${server.reason}`)),
    h("td", { class: "number extra" }, ""),
    tasksOf(server),
    h("td", { class: "extra" }, ""),
    h("td", { class: "extra" }, ""),
  ];
}

function serverCells(server, fleet) {
  const stepsOf = (one) => one.servers.find(({ server_id: id }) => id === server.server_id)?.steps;
  const state = server.draining || server.stale ? ["draining", "truncated_time"] : ["ok", "completed"];
  const heard = server.heard_s < 1 ? "now" : `${duration(server.heard_s)} ago`;
  return [
    nameOf(server),
    h("td", {}, load(server)),
    h("td", {}, h("span", { class: `badge ${state[1]}` }, state[0]), " ", drainButton(server)),
    h("td", { class: "number extra" }, perSecond(fleet.rate(stepsOf))),
    tasksOf(server),
    h("td", { class: "extra" }, heard),
    h("td", { class: "extra" }, server.version),
  ];
}

function load({ open, capacity, waiting }) {
  const share = capacity ? Math.min(1, open / capacity) : 1;
  const fill = h("span", { class: share >= 0.9 ? "full" : "" });
  fill.style.width = `${(share * 100).toFixed(1)}%`;
  const text = `${open} / ${capacity}${waiting ? `, ${waiting} waiting` : ""}`;
  return h("div", { class: "load" }, h("span", { class: "bar", "aria-hidden": "true" }, fill), h("span", {}, text));
}

function taskCard(task) {
  const splits = Object.entries(task.splits).map(([name, { num_samples }]) =>
    `${name} ${num_samples === null ? "(endless)" : `(${num_samples})`}`);
  const facts = [
    ["Splits", splits.join(", ")],
    ["Turns", `at most ${task.max_turns}`],
    ["Offers", task.capabilities.join(", ")],
  ].filter(([, value]) => value);
  const query = new URLSearchParams({ task: task.name });
  return h("article", { class: "card" },
    h("h3", {}, task.name),
    h("p", { class: "description" }, task.description),
    h("dl", { class: "figures", "data-task": task.name }),
    h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    h("details", {}, h("summary", {}, count(task.tools.length, "tool")), task.tools.map(toolEntry)),
    h("p", {},
      h("a", { href: `#/play?${query}` }, "Play"), " · ", h("a", { href: `#/sessions?${query}` }, "Sessions")),
  );
}

function toolEntry({ function: tool }) {
  const required = tool.parameters.required ?? [];
  const names = Object.keys(tool.parameters.properties ?? {});
  const parameters = names.map((name) => (required.includes(name) ? name : `${name}?`)).join(", ");
  return h("div", { class: "tool" },
    h("code", {}, `${tool.name}(${parameters})`),
    h("p", {}, tool.description),
    names.length ? h("details", {}, h("summary", {}, "schema"),
      h("pre", {}, JSON.stringify(tool.parameters, null, 2))) : null);
}
