// Starts the page: asks for a key where one is needed, follows the start of the engine, then looks at it every second.

import { ApiError, get, setKey } from "./api.js";
import * as engine from "./engine.js";
import * as playground from "./playground.js";

const $ = (id) => document.getElementById(id);
const EVERY_MS = 1000;
let known = false; // what the model can do
let busy = false;

function say(state, text) {
  $("state").dataset.state = state;
  if ($("state").textContent !== text) $("state").textContent = text;
}

async function look() {
  if (busy || document.hidden) return;
  busy = true;
  try {
    const status = await get("v1/internal/status?sequences=true");
    if (!known) await learn();
    $("startup").hidden = $("key-form").hidden = true;
    $("model").textContent = status.model;
    if (status.draining) say("loading", "Shutting down");
    else say("ready", "Ready");
    engine.show(status);
  } catch (error) {
    await explain(error);
  }
  busy = false;
}

async function learn() {
  try {
    const { chat_template } = await get("tokenizer_info");
    playground.allow({ chat: chat_template !== null, text: true });
  } catch (error) {
    if (!(error instanceof ApiError) || error.status !== 400) throw error;
    playground.allow({ chat: false, text: false });
  }
  $("version").textContent = `jhybrid ${(await get("version")).version}`;
  known = true;
}

async function explain(error) {
  if (!(error instanceof ApiError)) return say("bad", "No connection");
  if (error.status === 401) return askForKey();
  const startup = error.status === 503 ? await progress() : null;
  $("startup").hidden = startup === null;
  if (startup === null) return say("bad", error.body?.error?.code === "stuck" ? "Stuck" : error.message);
  const { phase, buckets, buckets_total, seconds } = startup;
  say("loading", "Loading");
  const count = buckets_total ? `: ${buckets} of ${buckets_total} shapes` : "";
  $("startup-text").textContent = `The model is not ready yet. ${phase}${count}, ${Math.round(seconds)} s`;
  if (buckets_total) {
    $("startup-bar").max = buckets_total;
    $("startup-bar").value = buckets;
  } else $("startup-bar").removeAttribute("value");
}

// How far the start is; null when it is over.
async function progress() {
  try {
    await get("ready");
  } catch (error) {
    const startup = error.body?.startup;
    if (startup && startup.phase !== "ready") return startup;
  }
  return null;
}

let tried = false;

function askForKey() {
  say("loading", "Key needed");
  if (tried) $("key-error").textContent = "That key is not known here.";
  if ($("key-form").hidden) {
    $("key-form").hidden = false;
    $("key").focus();
  }
  tried = false;
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  $("key").value = "";
  $("key-error").textContent = "";
  tried = true;
  look();
});

document.addEventListener("visibilitychange", look);
window.addEventListener("resize", engine.redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", engine.redraw);
playground.setUp();
look();
setInterval(look, EVERY_MS);
