"use strict";
// Text of people and of the model only ever becomes textContent: nothing in it is markup.

const at = (id) => document.getElementById(id);
const state = { model: null, chat: false, messages: [], running: null };

function node(parent, tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function headers() {
  const found = { "Content-Type": "application/json" };
  if (at("key").value) found.Authorization = `Bearer ${at("key").value}`;
  return found;
}

function problem(text) {
  at("problem").textContent = text;
  at("problem").hidden = !text;
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function connect() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (response.status === 401) {
      at("model").textContent = "needs a key";
      at("key").placeholder = "needed";
      return;
    }
    state.model = (await response.json()).data[0];
    at("model").textContent = `${state.model.id}, reads ${state.model.max_model_len} tokens`;
    at("max-tokens").max = state.model.max_model_len;
    at("max-tokens").value = Math.min(at("max-tokens").value, Math.max(1, Math.floor(state.model.max_model_len / 2)));
    at("mode-chat").title = state.model.chat_template ? "" : "the tokenizer of this model has no chat template";
    problem("");
  } catch {
    at("model").textContent = "not reached";
  }
}

function settings() {
  const found = {
    model: state.model ? state.model.id : undefined,
    temperature: Number(at("temperature").value),
    top_p: Number(at("top-p").value),
    top_k: Number(at("top-k").value) || 0,
    repetition_penalty: Number(at("repetition").value) || 1,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (at("seed").value !== "") found.seed = Number(at("seed").value);
  if (at("stop").value) found.stop = at("stop").value;
  return found;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

// One form for both endpoints: text, and rows of {token, logprob, top: [[token, logprob], ...]}.
function read(choice) {
  if (choice.delta) {
    const rows = (choice.logprobs && choice.logprobs.content) || [];
    return {
      text: choice.delta.content || "",
      rows: rows.map((row) => ({ logprob: row.logprob, top: row.top_logprobs.map((t) => [t.token, t.logprob]) })),
    };
  }
  const table = choice.logprobs;
  const rows = table ? table.token_logprobs.map((logprob, i) => ({ logprob, top: Object.entries(table.top_logprobs[i] || {}) })) : [];
  return { text: choice.text, rows };
}

const share = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)}%`;

function show(place, found, waiting) {
  waiting.push(...found.rows);
  if (!found.text) return;
  const likely = waiting.length ? Math.exp(Math.min(...waiting.map((row) => row.logprob))) : 1;
  const step = likely < 0.05 ? " p0" : likely < 0.25 ? " p1" : likely < 0.6 ? " p2" : " p3";
  const made = node(place, "span", `token${waiting.length ? step : ""}`, found.text);
  made.rows = waiting.splice(0);
}

async function generate(event) {
  if (event) event.preventDefault();
  if (!state.model) await connect();
  if (state.running) return;
  const prompt = at("prompt").value || (state.chat ? "" : at("prompt").placeholder);
  if (!prompt) return;
  problem("");
  const output = at("output");
  const { chat, messages } = state; // Clear replaces the list, so that a late answer does not enter the next dialogue
  const body = settings();
  let path, place;
  if (chat) {
    messages.push({ role: "user", content: prompt });
    const asked = node(output, "div", "turn");
    node(asked, "b", "", "You");
    node(asked, "span", "", prompt);
    place = node(output, "div", "turn");
    node(place, "b", "", state.model ? state.model.id : "Model");
    path = "/v1/chat/completions";
    Object.assign(body, { messages, max_completion_tokens: Number(at("max-tokens").value), logprobs: true, top_logprobs: 5 });
  } else {
    output.replaceChildren();
    node(output, "span", "given", prompt);
    if (state.model && !state.model.continues_prompts) node(output, "br");
    place = node(output, "span");
    path = "/v1/completions";
    Object.assign(body, { prompt, max_tokens: Number(at("max-tokens").value), logprobs: 5 });
  }
  const control = new AbortController();
  state.running = control;
  at("go").disabled = true;
  at("halt").disabled = false;
  let text = "", ended = null, tokens = 0, first = 0, counts = null;
  const began = performance.now();
  try {
    const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: control.signal });
    if (!response.ok) throw new Error(await refusal(response));
    const waiting = [];
    for await (const item of events(response)) {
      control.signal.throwIfAborted(); // several events may have come in one read
      if (item.error) throw new Error(item.error.message);
      if (item.usage) counts = item.usage;
      for (const choice of item.choices) {
        const found = read(choice);
        tokens += found.rows.length;
        if (found.rows.length && !first) first = performance.now();
        text += found.text;
        show(place, found, waiting);
        if (choice.finish_reason) ended = choice.finish_reason;
      }
      const seconds = (performance.now() - first) / 1000;
      if (tokens > 1) at("speed").textContent = `${tokens} tokens, ${((tokens - 1) / seconds).toFixed(1)} tokens/s`;
      output.scrollTop = output.scrollHeight;
    }
    const all = ((performance.now() - began) / 1000).toFixed(2);
    at("speed").textContent += `, first after ${Math.round(first - began)} ms, ${all} s in all` +
      (counts ? `, prompt of ${counts.prompt_tokens}` : "");
    if (ended && ended !== "stop") node(place, "span", "end", ` [${ended}]`);
    if (chat) at("prompt").value = "";
  } catch (error) {
    if (error.name === "AbortError") node(place, "span", "end", " [stopped]");
    else if (state.running === control) problem(error.message);
    if (chat && !text) {
      messages.pop();
      if (error.name !== "AbortError") { place.previousSibling?.remove(); place.remove(); }
    }
  } finally {
    if (chat && text) messages.push({ role: "assistant", content: text });
    if (state.running === control) release();
  }
}

function release() {
  state.running = null;
  at("go").disabled = false;
  at("halt").disabled = true;
}

function choose(chat) {
  state.chat = chat;
  at("mode-complete").setAttribute("aria-selected", String(!chat));
  at("mode-chat").setAttribute("aria-selected", String(chat));
  at("prompt").placeholder = chat ? "Say something" : "Once upon a time";
  at("go").textContent = chat ? "Send" : "Generate";
  clear();
  problem(chat && state.model && !state.model.chat_template ? "The tokenizer of this model has no chat template: use Complete." : "");
}

function clear() {
  if (state.running) state.running.abort();
  release();
  state.messages = [];
  at("output").replaceChildren();
  problem("");
}

function tip(event) {
  const rows = event.target.rows;
  at("tip").hidden = !(rows && rows.length);
  if (at("tip").hidden) return;
  at("tip").textContent = rows.map((row) => [share(row.logprob), ...row.top.map(([token, value]) => `${share(value).padStart(6)}  ${JSON.stringify(token)}`)].join("\n")).join("\n\n");
  const place = event.target.getBoundingClientRect();
  const size = at("tip").getBoundingClientRect();
  at("tip").style.left = `${Math.max(4, Math.min(place.left, innerWidth - size.width - 4))}px`;
  at("tip").style.top = `${place.bottom + size.height + 8 > innerHeight ? place.top - size.height - 4 : place.bottom + 4}px`;
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
}

if (localStorage.getItem("theme")) document.documentElement.dataset.theme = localStorage.getItem("theme");
at("output").classList.add("shaded");
at("form").addEventListener("submit", generate);
at("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate(event); });
at("halt").addEventListener("click", () => state.running && state.running.abort());
at("clear").addEventListener("click", clear);
at("theme").addEventListener("click", theme);
at("mode-complete").addEventListener("click", () => choose(false));
at("mode-chat").addEventListener("click", () => choose(true));
at("shade").addEventListener("change", () => at("output").classList.toggle("shaded", at("shade").checked));
at("output").addEventListener("mouseover", tip);
at("output").addEventListener("mouseleave", () => { at("tip").hidden = true; });
at("key").addEventListener("change", connect);
for (const name of ["temperature", "top-p"]) at(name).addEventListener("input", () => { at(`${name}-shown`).textContent = at(name).value; });
connect();
