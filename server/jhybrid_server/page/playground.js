// The playground: what was said, and the answer as it streams in.

import { stream } from "./api.js";

const $ = (id) => document.getElementById(id);
const messages = []; // of the chat, as the API takes them
let running = null; // AbortController of the answer under way

export function setUp() {
  $("compose").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running === null && $("prompt").value.trim()) send($("prompt").value);
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("compose").requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", clear);
  for (const radio of document.getElementsByName("mode")) radio.addEventListener("change", showMode);
  showMode();
}

// What the model can do: `chat` needs a template, `text` a tokenizer.
export function allow({ chat, text }) {
  $("mode-chat").disabled = !chat;
  $("mode-text").disabled = !text;
  if (!chat) $("mode-text").checked = true;
  $("prompt").disabled = $("send").disabled = !chat && !text;
  if (!text) $("empty").textContent = "This model has no tokenizer: it takes token ids, through the API.";
  showMode();
}

function isChat() {
  return $("mode-chat").checked;
}

function showMode() {
  $("system-field").hidden = !isChat();
  $("prompt").placeholder = isChat() ? "Ask something" : "Begin a text, for the model to go on";
}

function clear() {
  running?.abort();
  messages.length = 0;
  $("transcript").replaceChildren($("empty"));
  $("empty").hidden = false;
  $("prompt").focus();
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function settings() {
  const body = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = $(name).valueAsNumber;
    if (!Number.isNaN(value)) body[name] = value;
  }
  return body;
}

async function send(text) {
  const chat = isChat();
  $("prompt").value = "";
  $("empty").hidden = true;
  if (chat) $("transcript").append(element("p", "turn user", text));
  const turn = element("div", "turn assistant streaming");
  const thought = element("span", "thought");
  thought.hidden = true;
  const answer = element("span", "text");
  const cost = element("span", "cost");
  turn.append(thought, ...(chat ? [] : [element("span", "given", text)]), answer, cost);
  $("transcript").append(turn);
  turn.scrollIntoView({ block: "nearest" });

  const system = $("system").value.trim();
  const asked = [...messages, { role: "user", content: text }];
  const body = chat
    ? { messages: system ? [{ role: "system", content: system }, ...asked] : asked }
    : { prompt: text };
  running = new AbortController();
  busy(true);
  let ending = "Answer complete.";
  try {
    const path = chat ? "v1/chat/completions" : "v1/completions";
    for await (const event of stream(path, { ...settings(), ...body }, running.signal)) {
      const [choice] = event.choices;
      const delta = chat ? choice?.delta : choice;
      if (delta?.reasoning_content) {
        thought.hidden = false;
        thought.textContent += delta.reasoning_content;
      }
      append(answer, (chat ? delta?.content : delta?.text) ?? "");
      if (event.usage) cost.textContent = describe(event);
    }
    if (chat) messages.push(asked.at(-1), { role: "assistant", content: answer.textContent });
  } catch (error) {
    const stopped = error.name === "AbortError";
    ending = stopped ? "Stopped." : `Failed: ${error.message}`;
    cost.textContent = ending;
    cost.classList.toggle("error", !stopped);
    if (chat && answer.textContent) messages.push(asked.at(-1), { role: "assistant", content: answer.textContent });
  }
  turn.classList.remove("streaming");
  running = null;
  busy(false);
  $("announcer").textContent = `${ending} ${answer.textContent}`;
}

function append(answer, text) {
  if (!text) return;
  const box = $("transcript");
  const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  answer.append(text);
  if (follows) box.scrollTop = box.scrollHeight;
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("transcript").setAttribute("aria-busy", String(is));
  if (!is) $("prompt").focus();
}

function describe({ usage, jhybrid }) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [`${usage.completion_tokens} tokens`];
  const first = jhybrid?.first_token_seconds;
  if (first != null) {
    parts.push(`first after ${Math.round(first * 1000)} ms`);
    const rate = (usage.completion_tokens - 1) / (jhybrid.total_seconds - first);
    if (Number.isFinite(rate) && rate > 0) parts.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
  }
  parts.push(`prompt ${usage.prompt_tokens}` + (cached ? `, of it ${cached} from cache` : ""));
  return parts.join(" · ");
}
