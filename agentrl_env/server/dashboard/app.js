// The frame: which view is shown (by the address's fragment), and how the server is.

import { call, forgetToken, hasToken, poll, report } from "./api.js";
import { overview } from "./overview.js";
import { playground } from "./playground.js";
import { session } from "./session.js";
import { sessions } from "./sessions.js";

const FLEET_S = 2;
const RATE_LOOKS = 6; // throughput is over the last ten seconds
const views = { "": overview, sessions, session, play: playground };
const watchers = new Set();
let leave = new AbortController();

/** Where we are: "#/sessions?task=guess" is ["sessions"] with a query. */
function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view = "", id = ""] = path.split("/").map(decoded);
  return { view, id, query: new URLSearchParams(query) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a lone "%": no name here has one
  }
}

function show() {
  if (location.hash === "#main") return;
  leave.abort();
  leave = new AbortController();
  watchers.clear();
  report("user", null);
  const { view, id, query } = route();
  const main = document.getElementById("main");
  const name = Object.hasOwn(views, view) ? view : "";
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
let looks = []; // what was counted at the last looks, and when, by this page's clock

/** Tell a view of the fleet, now and whenever it was looked at again. */
function watch(listener) {
  watchers.add(listener);
  if (latest) listener(latest);
}

async function look() {
  try {
    latest = await call("v1/fleet");
    looks = [...looks.slice(1 - RATE_LOOKS), { at: performance.now(), fleet: latest }];
    latest.rate = (count) => rate(count, looks[0], looks.at(-1));
  } catch (error) {
    latest = null;
    looks = [];
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

/** What grows by how much a second, where `count` takes it out of a fleet; null while that is unknown. */
function rate(count, first, last) {
  const [before, now] = [count(first.fleet), count(last.fleet)];
  if (last.at === first.at || before === undefined || now === undefined) return null;
  return Math.max(0, now - before) / ((last.at - first.at) / 1000);
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
