// One session, live.

import { attempt, call, poll, Refused } from "./api.js";
import { badge, count, h, number } from "./dom.js";
import { TranscriptView } from "./transcript.js";

const LIVE_S = 1;

export function session(root, { id, signal }) {
  const view = new TranscriptView();
  const facts = h("p", { class: "facts", role: "status" }, "Loading …");
  const play = h("a", { class: "button", href: `#/play/${encodeURIComponent(id)}`, hidden: true }, "Play on");
  const close = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => end(id, close) },
    "Close the session");
  root.append(
    h("h2", {}, "Session"), h("p", {}, h("code", { class: "id" }, id)),
    h("div", { class: "controls" }, facts, h("div", { class: "buttons" }, play, close)), view.element,
  );
  follow(id, view, signal, (answer) => {
    showFacts(facts, answer);
    play.hidden = close.hidden = answer.status !== "running";
  }, (error) => facts.replaceChildren(error.message));
  return "Session";
}

/**
 * Keep a view up to date until the session has ended or the signal says stop.
 * Tells `changed` of each answer, and `gone` of the refusal after which there is nothing to follow.
 */
export function follow(id, view, signal, changed, gone) {
  let after = "";
  const over = new AbortController();
  const both = AbortSignal.any([signal, over.signal]);
  poll(async () => {
    let answer;
    try {
      answer = await call(`v1/sessions/${encodeURIComponent(id)}/transcript${after}`, { signal: both });
    } catch (error) {
      if (!(error instanceof Refused) || ![404, 410].includes(error.status)) throw error;
      over.abort();
      gone(error);
      return;
    }
    if (!after) view.begin(answer.messages);
    view.addTurns(answer.turns);
    after = `?after=${view.turn}`;
    changed(answer);
    if (answer.status !== "running") over.abort();
  }, LIVE_S, both);
}

/** Say in one line how a session stands. */
export function showFacts(line, { sample, status, turn, reward }) {
  const where = [sample.split, sample.index].filter((part) => part !== null).join(" ");
  const facts = [sample.task, where, `seed ${sample.seed}`, count(turn, "turn"), `reward ${number(reward)}`];
  const words = facts.join(" · ");
  if (line.dataset.shown === words + status) return;
  line.dataset.shown = words + status;
  line.replaceChildren(badge(status), ` ${words}`);
}

/** Close a session at its user's wish. */
export async function end(id, button) {
  button.disabled = true;
  await attempt(() => call(`v1/sessions/${encodeURIComponent(id)}`, { method: "DELETE" }));
  button.disabled = false;
}
