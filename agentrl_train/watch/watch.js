// Loads the parts of the page and replaces those that have changed. The server escapes everything that a
// model, a task or a file wrote; the content security policy permits no other script.

const EVERY_MS = 2000;
const TOKEN = "agentrl-watch-token";
const find = (selector, root = document) => root.querySelector(selector);
const form = find("#filter");
const list = find("#list");
const tip = find("#tip");
const shown = {};
let page = 0;
let newer = null;

/** Return the text of a part; ask for the token if the server requires one. */
async function load(path) {
  for (;;) {
    const token = sessionStorage.getItem(TOKEN);
    const headers = token ? { authorization: `Bearer ${token}` } : {};
    const response = await fetch(`data/${path}`, { headers, cache: "no-cache", signal: AbortSignal.timeout(60000) });
    if (response.ok) return response.text();
    if (response.status !== 401) throw new Error(await reason(response));
    await askToken();
  }
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `HTTP ${response.status}`;
  }
}

function askToken() {
  const dialog = find("#ask-token");
  const input = find("#token");
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(TOKEN, input.value.trim());
      input.value = "";
      resolve();
    }, { once: true });
    if (!dialog.open) dialog.showModal();
  });
}

function trouble(text) {
  const place = find("#trouble");
  place.hidden = !text;
  if (place.textContent !== text) place.textContent = text;
}

/** Put HTML of this server into an element; parts that are open stay open. */
function show(element, html) {
  const open = new Map([...element.querySelectorAll("details[open]")].map((one) => [keyOf(one), one]));
  const fresh = document.createElement("template");
  fresh.innerHTML = html;
  for (const one of fresh.content.querySelectorAll("details")) {
    const old = open.get(keyOf(one));
    if (old && one.dataset.load) one.replaceWith(old);
    else if (old) one.open = true;
  }
  element.replaceChildren(fresh.content);
}

const keyOf = (details) => details.dataset.load ?? find("summary", details)?.textContent;

async function part(name) {
  const html = await load(name);
  if (shown[name] === html) return;
  shown[name] = html;
  show(find(`#${name}`), html);
}

function query() {
  const fields = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (value !== "") fields.set(name, value);
  return fields;
}

/** Load the list. While an episode is open, a changed list waits for a click, so that nothing moves. */
async function episodes(now) {
  const fields = query();
  fields.set("page", page);
  const html = await load(`episodes?${fields}`);
  if (shown.list === html) return;
  newer = html;
  if (now || !find("details[open]", list)) showNewer();
  else find("#newer").hidden = false;
}

function showNewer() {
  if (newer !== null) show(list, newer);
  shown.list = newer;
  newer = null;
  find("#newer").hidden = true;
}

async function about() {
  const text = await load("about");
  if (shown.about === text) return;
  shown.about = text;
  const runs = JSON.parse(text);
  document.title = runs.map((run) => run.name).join(" and ");
  fill(form.elements.run, runs.map((run, number) => [number, run.name]));
  form.elements.run.parentElement.hidden = runs.length < 2;
  const tasks = runs[Number(form.elements.run.value) || 0].tasks;
  fill(form.elements.task, [["", "all"], ...tasks.map((task) => [task, task])]);
}

function fill(select, options) {
  const value = select.value || new URLSearchParams(location.search).get(select.name) || "";
  select.replaceChildren(...options.map(([one, text]) => new Option(text, one)));
  select.value = value;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
}

async function refresh() {
  try {
    await about();
    await part("overview");
    await part("curves");
    await episodes(false);
    trouble("");
  } catch (error) {
    trouble(`The page is not updated: ${error.message || error}. Is agentrl-train watch running?`);
  }
}

async function forever() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((resolve) => {
      const timer = setTimeout(done, EVERY_MS);
      document.addEventListener("visibilitychange", done);
      function done() {
        clearTimeout(timer);
        document.removeEventListener("visibilitychange", done);
        resolve();
      }
    });
  }
}

async function select() {
  if (form.elements.run.options.length > 1) delete shown.about;
  history.replaceState(null, "", `?${query()}`);
  try {
    await about();
    await episodes(true);
  } catch (error) {
    trouble(String(error.message || error));
  }
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", (event) => {
  if (event.target.id === "colouring") {
    list.dataset.colour = event.target.value;
    return;
  }
  page = 0;
  select();
});
find("#newer button").addEventListener("click", showNewer);
list.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-page]");
  if (!button) return;
  page = Number(button.dataset.page);
  select();
});
list.addEventListener("toggle", async (event) => {
  const row = event.target;
  if (!row.open || !row.dataset.load || row.dataset.loaded) return;
  row.dataset.loaded = "yes";
  const inside = find(".inside", row);
  inside.textContent = "Loading …";
  try {
    show(inside, await load(row.dataset.load));
  } catch (error) {
    delete row.dataset.loaded;
    inside.textContent = `The episode cannot be read: ${error.message || error}`;
  }
}, true);

function describe(token) {
  const [logprob, advantage, version, id] = JSON.parse(token.dataset.t);
  const lines = [`token ${id}`];
  if (logprob !== null) lines.push(`log-probability ${logprob.toFixed(4)} (${(100 * Math.exp(logprob)).toPrecision(3)}%)`);
  lines.push(advantage === null ? "advantage not recorded" : `advantage ${advantage > 0 ? "+" : ""}${advantage}`);
  if (version !== null) lines.push(`policy version ${version}`);
  return lines.join("\n");
}

function point(event) {
  const token = event.target.closest?.("[data-t]");
  tip.hidden = !token;
  if (!token) return;
  tip.textContent = describe(token);
  const box = token.getBoundingClientRect();
  const width = document.documentElement.clientWidth;
  const left = Math.max(8, Math.min(event.clientX, width - tip.offsetWidth - 8));
  const below = box.bottom + tip.offsetHeight + 14 < innerHeight;
  // The style sheet of the policy forbids style attributes in HTML, and not the object model.
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
}

document.addEventListener("pointerover", point);
document.addEventListener("pointerdown", point);
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

for (const [name, value] of new URLSearchParams(location.search)) {
  if (form.elements[name] && name !== "run" && name !== "task") form.elements[name].value = value;
}
forever();
