"use strict";
// A user's text only ever becomes textContent. An answer of a chat becomes Markdown: marked shows raw HTML as text,
// and DOMPurify, the only maker of markup that the page's policy admits, lets through the tags of TAGS alone.

const at = (id) => document.getElementById(id);
const state = { models: [], model: null, talk: null, running: null, follow: true, lastTop: 0, shaded: { chat: false, complete: true } };
const tokens = new WeakMap(); // message -> pieces {text, rows}; kept until the page is left, as they are large

function node(parent, tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function problem(text) {
  at("problem").textContent = text;
  at("problem").hidden = !text;
}

// --- The server ------------------------------------------------------------------------------------------------------

function headers() {
  const found = { "Content-Type": "application/json" };
  if (at("key").value) found.Authorization = `Bearer ${at("key").value}`;
  return found;
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
      at("model").textContent = "needs a key: see the settings";
      at("key").placeholder = "needed";
      return;
    }
    state.models = (await response.json()).data;
    at("models").replaceChildren(...state.models.map((model) => new Option(model.id)));
    at("models").hidden = state.models.length < 2;
    chooseModel();
    problem("");
  } catch {
    at("model").textContent = "not reached";
  }
}

function chooseModel() {
  state.model = state.models[at("models").selectedIndex];
  const reads = `reads ${state.model.max_model_len} tokens`;
  at("model").textContent = state.models.length > 1 ? reads : `${state.model.id}, ${reads}`;
  at("max-tokens").max = state.model.max_model_len;
  if (!state.talk.messages.length && !state.talk.chosen) state.talk.mode = state.model.chat_template ? "chat" : "complete";
  paint();
}

function request(talk) {
  const number = (id, otherwise) => (at(id).value === "" ? otherwise : Number(at(id).value));
  const body = {
    model: state.model ? state.model.id : undefined,
    temperature: number("temperature"),
    top_p: number("top-p"),
    top_k: number("top-k", 0),
    repetition_penalty: number("repetition", 1),
    seed: number("seed"),
    stop: at("stop").value || undefined,
    stream: true,
    stream_options: { include_usage: true },
  };
  const said = talk.messages.map(({ role, content }) => ({ role, content }));
  if (talk.mode === "chat") {
    const system = at("system").value.trim() ? [{ role: "system", content: at("system").value }] : [];
    const most = number("max-tokens");
    return ["/v1/chat/completions", { ...body, messages: [...system, ...said], max_completion_tokens: most, logprobs: true, top_logprobs: 5 }];
  }
  const half = state.model ? Math.max(1, Math.floor(state.model.max_model_len / 2)) : 128;
  return ["/v1/completions", { ...body, prompt: said.at(-1).content, max_tokens: number("max-tokens", Math.min(128, half)), logprobs: 5 }];
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

// One form for both endpoints: text, and rows of {logprob, top: [[token, logprob], ...]}.
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

// Ask for an answer to the last message of a conversation, which may be another one than is shown when it ends.
async function ask(talk) {
  if (state.running) return;
  const control = new AbortController();
  state.running = control;
  const message = { role: "assistant", content: "" };
  const pieces = [], waiting = [];
  tokens.set(message, pieces);
  problem("");
  if (!state.model) await connect();
  const [path, body] = request(talk);
  save(talk);
  talk.messages.push(message);
  state.follow = true;
  paint();
  at("status").textContent = "The model is writing.";
  let count = 0, first = 0, usage = null;
  const began = performance.now();
  try {
    const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal: control.signal });
    if (!response.ok) throw new Error(await refusal(response));
    for await (const item of events(response)) {
      control.signal.throwIfAborted(); // several events may have come in one read
      if (item.error) throw new Error(item.error.message);
      if (item.usage) usage = item.usage;
      for (const choice of item.choices) {
        const found = read(choice);
        count += found.rows.length;
        if (!first && (found.rows.length || found.text)) first = performance.now();
        waiting.push(...found.rows);
        if (found.text) pieces.push({ text: found.text, rows: waiting.splice(0) });
        message.content += found.text;
        if (choice.finish_reason && choice.finish_reason !== "stop") message.note = choice.finish_reason;
      }
      if (count > 1) message.meta = `${count} tokens, ${((count - 1) / (performance.now() - first) * 1000).toFixed(1)} tokens/s`;
      drawSoon(talk, message);
    }
    const all = ((performance.now() - began) / 1000).toFixed(2);
    message.meta = [message.meta || `${count} tokens`, `first after ${Math.round((first || performance.now()) - began)} ms`,
      `${all} s in all`, ...(usage ? [`prompt of ${usage.prompt_tokens}`] : [])].join(", ");
  } catch (error) {
    if (error.name === "AbortError") message.note = "stopped";
    else {
      message.note = "failed";
      if (state.talk === talk) problem(error.message);
    }
  } finally {
    if (!message.content && message.note) talk.messages.splice(talk.messages.indexOf(message), 1);
    save(talk);
    if (state.running === control) state.running = null;
    if (state.talk === talk) {
      paint();
      at("status").textContent = message.note === "failed" ? "" : `${message.content} ${message.note || ""}`; // once, as a whole
    } else list();
  }
}

function halt() {
  if (state.running) state.running.abort();
  state.running = null;
}

// --- Conversations, each under a key of its own so that several tabs do not overwrite one another ---------------------

const KEY = "megalith.talk.";

function save(talk) {
  const { id, mode } = talk, messages = talk.messages.filter((message) => message.content);
  if (talk.deleted || !messages.length) return;
  try {
    localStorage.setItem(KEY + id, JSON.stringify({ id, mode, messages, at: Date.now() }));
  } catch (error) {
    problem(`This conversation is not kept: ${error.message}`);
  }
}

function kept() {
  const found = [];
  for (const key of Object.keys(localStorage)) {
    if (!key.startsWith(KEY)) continue;
    try {
      found.push(JSON.parse(localStorage.getItem(key)));
    } catch {
      localStorage.removeItem(key);
    }
  }
  return found.sort((one, other) => other.at - one.at);
}

function open(talk) {
  halt();
  state.talk = talk || { id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), mode: mode(), messages: [] };
  sessionStorage.setItem("megalith.open", state.talk.id);
  state.follow = true;
  problem("");
  showHistory(false);
  paint();
}

function mode() {
  if (state.talk && (state.talk.chosen || state.talk.messages.length)) return state.talk.mode;
  return state.model && state.model.chat_template ? "chat" : "complete";
}

function choose(mode) {
  if (mode !== state.talk.mode) open();
  Object.assign(state.talk, { mode, chosen: true });
  paint();
  at("prompt").focus();
}

function list() {
  const talks = kept();
  at("talks").replaceChildren();
  for (const talk of talks) {
    const title = talk.messages[0].content.trim().slice(0, 80) || "(empty)";
    const row = node(at("talks"), "li");
    const button = node(row, "button", "talk", title);
    button.type = "button";
    if (talk.id === state.talk.id) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => { if (talk.id !== state.talk.id) open(kept().find((one) => one.id === talk.id)); });
    const away = node(row, "button", "icon", "\u00d7");
    away.type = "button";
    away.setAttribute("aria-label", `Delete the conversation: ${title}`);
    away.addEventListener("click", () => {
      if (!confirm(`Delete this conversation?\n\n${title}`)) return;
      localStorage.removeItem(KEY + talk.id);
      if (talk.id === state.talk.id) {
        state.talk.deleted = true;
        open();
      } else list();
      at("new").focus();
    });
  }
}

// --- What is shown ---------------------------------------------------------------------------------------------------

const TAGS = ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p",
  "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"];
const CLEAN = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "title", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["align", "checked", "disabled", "start", "type"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const escaped = (text) => text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
marked.use({
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ raw }) => escaped(raw), // nothing is loaded
    code({ text, lang }) {
      const language = (lang || "").match(/^[\w+#.-]*/)[0];
      const known = hljs.getLanguage(language);
      const inner = known ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escaped(text);
      return `<pre><code class="language-${language}">${inner}</code></pre>`;
    },
  },
});

function markdown(text) {
  const made = DOMPurify.sanitize(marked.parse(text), CLEAN);
  for (const link of made.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer nofollow" });
  for (const table of made.querySelectorAll("table")) {
    const frame = document.createElement("div");
    Object.assign(frame, { className: "scrolls", tabIndex: 0 });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of made.querySelectorAll("pre")) {
    const bar = at("code-bar").content.cloneNode(true);
    bar.querySelector("span").textContent = pre.firstChild.className?.replace("language-", "") || "text";
    pre.tabIndex = 0; // long lines scroll by the keys too
    pre.before(bar);
  }
  return made;
}

const share = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)}%`;

function fillTokens(place, pieces) {
  for (const { text, rows } of pieces.slice(place.childElementCount)) {
    const likely = rows.length ? Math.exp(Math.min(...rows.map((row) => row.logprob))) : 1;
    const step = likely < 0.05 ? " p0" : likely < 0.25 ? " p1" : likely < 0.6 ? " p2" : " p3";
    node(place, "span", `token${rows.length ? step : ""}`, text).rows = rows;
  }
  place.tabIndex = 0; // the arrow keys go from token to token
}

function fill(place, talk, message) {
  const plain = talk.mode === "complete" || at("shade").checked;
  const pieces = tokens.get(message);
  if (message.role === "assistant" && plain && pieces && pieces.length) fillTokens(place, pieces);
  else if (message.role === "assistant" && !plain) place.replaceChildren(markdown(message.content));
  else place.textContent = message.content;
  place.classList.toggle("plain", plain || message.role !== "assistant");
}

function turn(talk, message, index) {
  const made = at("turn").content.firstElementChild.cloneNode(true);
  const answers = message.role === "assistant", last = index === talk.messages.length - 1;
  const busy = state.running && answers && last;
  made.classList.add(answers ? "answer" : "given");
  made.classList.toggle("busy", Boolean(busy));
  const name = answers ? (state.model ? state.model.id : "Model") : talk.mode === "complete" ? "Prompt" : "You";
  made.setAttribute("aria-label", name);
  made.querySelector("h2").textContent = name;
  made.message = message;
  fill(made.querySelector(".text"), talk, message);
  fillMeta(made, message);
  const shown = { copy: !busy, edit: !state.running && (answers ? talk.mode === "complete" : true), again: !state.running && last };
  for (const [what, is] of Object.entries(shown)) made.querySelector(`[data-do=${what}]`).hidden = !is;
  if (!answers) made.querySelector("[data-do=again]").textContent = "Answer";
  return made;
}

function fillMeta(turn, message) {
  turn.querySelector(".meta").textContent = [message.meta, message.note && `[${message.note}]`].filter(Boolean).join(" ");
}

function paint() {
  const { talk, running } = state, chat = talk.mode === "chat", focused = document.activeElement;
  const output = at("output"), top = output.scrollTop;
  at("shade").checked = state.shaded[talk.mode];
  output.className = `${talk.mode}${at("shade").checked ? " shaded" : ""}`;
  if (state.model && !state.model.continues_prompts) output.classList.add("answers");
  output.replaceChildren(...talk.messages.map((message, index) => turn(talk, message, index)));
  if (!talk.messages.length) node(output, "p", "empty", chat ? "Say something to the model." : "The model continues the text that you give it.");
  const cannot = chat && state.model && !state.model.chat_template;
  if (cannot) problem("The tokenizer of this model has no chat template: use Complete, or start the server with --chat-template FILE.");
  for (const name of ["chat", "complete"]) at(`mode-${name}`).setAttribute("aria-pressed", String(name === talk.mode));
  at("prompt").placeholder = chat ? "Say something" : "Once upon a time";
  at("go").textContent = chat ? "Send" : "Generate";
  at("new").lastElementChild.textContent = chat ? "New chat" : "New text";
  at("go").disabled = Boolean(cannot);
  at("go").hidden = Boolean(running);
  at("halt").hidden = !running;
  list();
  output.scrollTop = top;
  scroll();
  if (document.activeElement === focused && !focused.hidden) return;
  at(running ? "halt" : matchMedia("(pointer: coarse)").matches ? "output" : "prompt").focus(); // its button has gone
}

// Draw at most once a frame, and rest for four times as long as the last drawing of a long answer took.
let drawing = 0, rest = 0;
function drawSoon(talk, message) {
  if (drawing || state.talk !== talk) return;
  drawing = setTimeout(() => requestAnimationFrame(() => {
    drawing = 0;
    const shown = at("output").lastElementChild;
    if (!shown || shown.message !== message) return;
    const began = performance.now();
    fill(shown.querySelector(".text"), talk, message);
    fillMeta(shown, message);
    scroll();
    rest = 4 * (performance.now() - began);
  }), rest);
}

function scroll() {
  const output = at("output");
  if (state.follow) output.scrollTop = output.scrollHeight;
  state.lastTop = output.scrollTop;
  at("latest").hidden = state.follow;
}

function scrolled() {
  const output = at("output");
  if (output.scrollHeight - output.scrollTop - output.clientHeight < 24) state.follow = true;
  else if (output.scrollTop < state.lastTop) state.follow = false; // the reader went up: growing text does not do that
  state.lastTop = output.scrollTop;
  at("latest").hidden = state.follow;
}

function tip(token) {
  const rows = token && token.rows;
  at("tip").hidden = !(rows && rows.length);
  if (at("tip").hidden) return;
  at("tip").textContent = rows.map((row) => [share(row.logprob), ...row.top.map(([token, value]) => `${share(value).padStart(6)}  ${JSON.stringify(token)}`)].join("\n")).join("\n\n");
  const place = token.getBoundingClientRect();
  const size = at("tip").getBoundingClientRect();
  at("tip").style.left = `${Math.max(4, Math.min(place.left, innerWidth - size.width - 4))}px`;
  at("tip").style.top = `${place.bottom + size.height + 8 > innerHeight ? place.top - size.height - 4 : place.bottom + 4}px`;
}

function tipByKey(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], place = event.target;
  if (event.key === "Escape") tip(null);
  if (!step || !place.classList.contains("text") || !place.querySelector(".token")) return;
  event.preventDefault();
  const all = [...place.children], now = all.findIndex((token) => token.classList.contains("current"));
  const next = all[Math.max(0, Math.min(all.length - 1, now + step))];
  if (now >= 0) all[now].classList.remove("current");
  next.classList.add("current");
  tip(next);
  at("status").textContent = `${next.textContent}: ${at("tip").textContent}`;
}

// --- What the reader does --------------------------------------------------------------------------------------------

function submit(event) {
  event.preventDefault();
  const { talk } = state, chat = talk.mode === "chat";
  const content = at("prompt").value || (chat ? "" : at("prompt").placeholder);
  if (state.running || at("go").disabled || !content.trim()) return;
  at("prompt").value = "";
  grow(at("prompt"));
  talk.messages.push({ role: "user", content });
  ask(talk);
}

function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing; // Enter that ends an input method's word does not
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

async function copy(button, text) {
  const before = button.textContent;
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else { // on a plain http address of another machine
      const area = node(document.body, "textarea", "unseen");
      area.value = text;
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      button.focus();
      if (!done) throw new Error("refused");
    }
    button.textContent = "Copied";
    at("status").textContent = "Copied";
  } catch {
    problem("The browser did not let the page copy.");
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

function edit(made, talk, index) {
  const editor = at("editor").content.firstElementChild.cloneNode(true), area = editor.querySelector("textarea");
  area.value = talk.messages[index].content;
  made.querySelector(".text").replaceChildren(editor);
  made.classList.add("edited");
  area.focus();
  grow(area);
  area.addEventListener("input", () => grow(area));
  editor.addEventListener("keydown", (event) => {
    if (event.key === "Escape") paint();
    if (event.target !== area || !sends(event)) return;
    event.preventDefault(); // or the key would press Stop, which has the focus by then
    editor.requestSubmit();
  });
  editor.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!area.value.trim() || state.running) return;
    talk.messages.splice(index, Infinity, { role: "user", content: area.value });
    ask(talk);
  });
}

function act(event) {
  const what = event.target.dataset.do, made = event.target.closest(".turn"), { talk } = state;
  if (!what || !made) return;
  const index = talk.messages.indexOf(made.message), { role, content } = made.message;
  if (what === "copy-code") copy(event.target, event.target.parentElement.nextElementSibling.textContent);
  else if (what === "copy") copy(event.target, talk.mode === "complete" && role === "assistant" ? talk.messages[index - 1].content + content : content);
  else if (what === "cancel") paint();
  else if (state.running) return;
  else if (what === "edit") {
    const given = role === "user" ? index : index - 1;
    edit(at("output").children[given], talk, given);
  } else if (what === "again") {
    if (role === "assistant") talk.messages.pop();
    ask(talk);
  }
}

function showHistory(open) {
  document.body.classList.toggle("with-history", open);
  at("menu").setAttribute("aria-expanded", String(open));
  if (open) at("new").focus();
}

// --- Settings; the key is kept for this tab only -----------------------------------------------------------------------

const SETTINGS = ["system", "max-tokens", "temperature", "top-p", "top-k", "repetition", "seed", "stop", "theme"];

function settingsChanged(event) {
  for (const name of ["temperature", "top-p"]) at(`${name}-shown`).textContent = at(name).value;
  if (at("theme").value) document.documentElement.dataset.theme = at("theme").value;
  else delete document.documentElement.dataset.theme;
  if (!event) return;
  const differ = SETTINGS.filter((id) => at(id).value !== at(id).standard);
  localStorage.setItem("megalith.settings", JSON.stringify(Object.fromEntries(differ.map((id) => [id, at(id).value]))));
  sessionStorage.setItem("megalith.key", at("key").value);
}

function readSettings() {
  const found = JSON.parse(localStorage.getItem("megalith.settings") || "{}");
  for (const id of SETTINGS) {
    at(id).standard = at(id).value;
    if (id in found) at(id).value = found[id];
  }
  at("key").value = sessionStorage.getItem("megalith.key") || "";
  settingsChanged();
}

readSettings();
const was = sessionStorage.getItem("megalith.open");
open(kept().find((talk) => talk.id === was));
connect();
at("form").addEventListener("submit", submit);
at("prompt").addEventListener("keydown", (event) => { if (sends(event)) submit(event); });
at("prompt").addEventListener("input", () => grow(at("prompt")));
at("halt").addEventListener("click", () => { if (state.running) state.running.abort(); at("prompt").focus(); });
at("new").addEventListener("click", () => { open(); at("prompt").focus(); });
at("menu").addEventListener("click", () => showHistory(!document.body.classList.contains("with-history")));
at("history").addEventListener("keydown", (event) => { if (event.key === "Escape") { showHistory(false); at("menu").focus(); } });
at("models").addEventListener("change", chooseModel);
at("mode-complete").addEventListener("click", () => choose("complete"));
at("mode-chat").addEventListener("click", () => choose("chat"));
at("shade").addEventListener("change", () => { state.shaded[state.talk.mode] = at("shade").checked; paint(); });
at("latest").addEventListener("click", () => { state.follow = true; scroll(); });
at("output").addEventListener("scroll", scrolled);
at("output").addEventListener("click", act);
at("output").addEventListener("keydown", tipByKey);
at("output").addEventListener("mouseover", (event) => tip(event.target));
at("output").addEventListener("mouseleave", () => tip(null));
at("open-settings").addEventListener("click", () => at("settings").showModal());
at("close-settings").addEventListener("click", () => at("settings").close());
at("settings").addEventListener("click", (event) => { if (event.target === at("settings")) at("settings").close(); });
at("settings").addEventListener("input", settingsChanged);
at("defaults").addEventListener("click", (event) => { for (const id of SETTINGS) at(id).value = at(id).standard; settingsChanged(event); });
at("key").addEventListener("change", connect);
addEventListener("storage", list); // another tab
addEventListener("click", (event) => { if (!event.target.closest("#history, #menu")) showHistory(false); });
addEventListener("pagehide", () => {
  if (!state.running) return;
  state.talk.messages.at(-1).note = "stopped";
  save(state.talk);
});
