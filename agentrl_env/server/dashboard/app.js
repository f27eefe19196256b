// The frame: which view is shown (by the address's fragment), and how the server is.

import { call, forgetToken, hasToken, poll, report } from "./api.js";
import { overview } from "./overview.js";
import { playground } from "./playground.js";
import { session } from "./session.js";
import { sessions } from "./sessions.js";

const FLEET_S = 2;
const views = { "": overview, sessions, session, play: playground };
const watchers = new Set();
let leave = new AbortController();

/** Where we are: "#/sessions?task=guess" is ["sessions"] with a query. */
function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view = "", id = ""] = path.split("/").map(decodeURIComponent);
  return { view, id, query: new URLSearchParams(query) };
}

function show() {
  if (location.hash === "#main") return;
  leave.abort();
  leave = new AbortController();
  watchers.clear();
  report("user", null);
  const { view, id, query } = route();
  const main = document.getElementById("main");
  const name = view in views ? view : "";
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.hash === (name === "session" ? "#/sessions" : `#/${name}`);
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren();
  const title = views[name](main, { id, query, signal: leave.signal, onFleet: watch });
  document.title = `${title} · agentrl-env`;
}

let latest = null;

/** Tell a view of the fleet, now and whenever it was looked at again. */
function watch(listener) {
  watchers.add(listener);
  if (latest) listener(latest);
}

async function look() {
  try {
    latest = await call("v1/fleet");
  } catch (error) {
    latest = null;
    health("unreachable", "failed_environment");
    throw error;
  } finally {
    document.getElementById("forget").hidden = !hasToken();
  }
  const { kind, name, servers, draining } = latest;
  document.getElementById("name").textContent =
    kind === "controller" ? `fleet of ${servers.length} at ${name || "this address"}` : name;
  health(draining ? "draining" : "ok", draining ? "truncated_time" : "completed");
  for (const listener of watchers) listener(latest);
}

function health(words, kind) {
  const badge = document.getElementById("health");
  if (badge.textContent !== words) badge.textContent = words;
  badge.className = `badge ${kind}`;
}

document.getElementById("forget").addEventListener("click", forgetToken);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
addEventListener("hashchange", show);
show();
poll(look, FLEET_S, new AbortController().signal);
