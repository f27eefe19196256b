// The server's calls. The token lives in sessionStorage and in the Authorization header, nowhere else.

const KEY = "agentrl-token";
const STEP_MS = 600_000;
const QUICK_MS = 20_000;
const acted = new EventTarget();
let asking = null;

/** An answer that is no success; the message is a sentence for people. */
export class Refused extends Error {
  constructor(status, type, message) {
    super(message);
    Object.assign(this, { status, type });
  }
}

/** Whether a token is kept. */
export const hasToken = () => sessionStorage.getItem(KEY) !== null;

export function forgetToken() {
  sessionStorage.removeItem(KEY);
  location.reload();
}

/**
 * Make a call and return its answer; where the server wants a token, ask for one and call again.
 * Throws Refused, or an AbortError once `signal` says that nobody waits any more.
 */
export async function call(path, { method = "GET", body, signal, slow = false } = {}) {
  for (;;) {
    const token = sessionStorage.getItem(KEY);
    const response = await send(path, method, body, signal, slow ? STEP_MS : QUICK_MS, token);
    if (response.status !== 401) return read(response);
    if (token === sessionStorage.getItem(KEY)) await askToken(token !== null);
    signal?.throwIfAborted();
  }
}

async function send(path, method, body, signal, limit, token) {
  const headers = { accept: "application/json" };
  if (token !== null) headers.authorization = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const deadline = AbortSignal.timeout(limit);
  const either = signal ? AbortSignal.any([signal, deadline]) : deadline;
  try {
    return await fetch(path, { method, headers, body, signal: either });
  } catch (error) {
    signal?.throwIfAborted();
    if (deadline.aborted) throw new Refused(0, "timeout", `No answer within ${limit / 1000} seconds.`);
    throw new Refused(0, "unreachable", "The server cannot be reached.");
  }
}

async function read(response) {
  if (response.status === 204) return null;
  let answer;
  try {
    answer = await response.json();
  } catch {
    throw new Refused(response.status, "protocol", `The answer (HTTP ${response.status}) is not JSON.`);
  }
  if (response.ok) return answer;
  const { type = "error", message = "no reason given" } = answer?.error ?? {};
  throw new Refused(response.status, type, sentence(message));
}

/** Ask once, however many calls wait for it. */
function askToken(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("ask-token");
    const input = document.getElementById("token");
    const why = document.getElementById("ask-token-why");
    if (wrong) why.textContent = "The server does not take this token. Enter the operator's.";
    input.value = "";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, input.value.trim());
      input.value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

const problems = new Map();

/** Say under the header what is wrong with something; without a message nothing is. */
export function report(source, message) {
  if (message) problems.set(source, message);
  else problems.delete(source);
  const line = document.getElementById("problem");
  const text = [...new Set(problems.values())].join(" ");
  if (line.textContent !== text) line.textContent = text;
  line.hidden = !text;
}

/** Do what the user asked for, and look at once what has become of it; report it where it fails. */
export async function attempt(work, signal) {
  try {
    await work();
    report("user", null);
    acted.dispatchEvent(new Event("acted"));
  } catch (error) {
    if (!signal?.aborted) report("user", words(error));
  }
}

function words(error) {
  return error instanceof Refused ? error.message : `This page is broken: ${error.message}`;
}

/** Run `work` now and then every so many seconds until `signal` aborts; not while nobody looks. */
export async function poll(work, seconds, signal) {
  while (!signal.aborted) {
    try {
      if (!document.hidden) await work();
      report(work, null);
    } catch (error) {
      if (!signal.aborted) report(work, words(error));
    }
    await pause(seconds * 1000, signal);
  }
  report(work, null);
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", done);
      acted.removeEventListener("acted", done);
      signal.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, ms);
    document.addEventListener("visibilitychange", done);
    acted.addEventListener("acted", done);
    signal.addEventListener("abort", done);
  });
}
