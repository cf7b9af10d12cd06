/** The page: a conversation with the model, about documents. */

import {call, events, useKey} from "./api.js";
import {Documents, withDocuments} from "./documents.js";
import {MarkdownView} from "./markdown.js";
import {RequestProgress, timingsInWords} from "./progress.js";

const SYSTEM_PROMPT = "offload-rt.system-prompt";
const REFRESH_MS = 500;
const $ = id => document.getElementById(id);

let model = null;
let messages = [];
let asked = [];  // the documents of the conversation
let running = null;
const documents = new Documents($("files"));

// ------------------------------------------------------------------------------------------- conversation

/** A question and its answer on the page. */
class Turn {
  element = make("section", "turn");
  thoughts = document.createTextNode("");
  #question;
  #names;
  #folded = make("details", "thoughts");
  #summary = make("summary", "", "Thinking …");
  #answer = make("div", "answer");
  #footer = make("div", "row");
  #markdown;

  constructor(question, names) {
    this.#question = question;
    this.#names = names;
    this.#markdown = new MarkdownView(this.#answer);
    const asked = make("div", "question", question);
    if (names.length) asked.prepend(make("span", "quiet", names.join(", ")));
    const thoughts = make("div");
    thoughts.append(this.thoughts);
    this.#folded.append(this.#summary, thoughts);
    this.#folded.hidden = true;
    this.#folded.open = true;
    this.element.append(asked, this.#folded, this.#answer, this.#footer);
    this.#answer.setAttribute("aria-busy", "true");
  }

  get answer() { return this.#markdown.source; }

  get begun() { return this.answer !== "" || this.thoughts.length > 0; }

  add({reasoning_content: thoughts, content}) {
    if (thoughts) {
      this.#folded.hidden = false;
      this.thoughts.appendData(thoughts);
    }
    if (content) {
      if (!this.answer) this.#fold();
      this.#markdown.append(content);
    }
  }

  /** Shows how the answer ended, and offers to copy it. */
  end(notes) {
    this.#fold();
    this.#markdown.finish();
    this.#answer.removeAttribute("aria-busy");
    if (this.answer) {
      const button = make("button", "copy", "Copy");
      button.type = "button";
      button.setAttribute("aria-label", "Copy the answer as Markdown");
      button.addEventListener("click", () => copy(button, this.answer));
      this.#footer.append(button);
    }
    this.#footer.append(make("span", "quiet stats", notes.filter(Boolean).join(" ")));
  }

  #fold() {
    this.#summary.textContent = "Thoughts";
    this.#folded.open = false;
  }
}

function make(tag, className = "", text = "") {
  return Object.assign(document.createElement(tag), {className, textContent: text});
}

function startAnew() {
  running?.abort();
  messages = [];
  asked = [];
  $("chat").replaceChildren();
  tell("");
}

/** Sends a question. If nothing of an answer comes, question and documents return to where they were typed and opened. */
async function ask(question) {
  const attached = documents.take(), chat = messages;
  const turn = new Turn(question, attached.map(({name}) => name));
  const user = {role: "user", content: withDocuments(attached, question, chat.length > 0)};
  const system = $("system").value.trim();
  const progress = new RequestProgress();
  const controller = running = new AbortController();
  let timings = null, reason = null, note = "";
  asked.push(...attached);
  $("chat").append(turn.element);
  scrollToEnd();
  tell("");
  showRunning(true);
  const refresh = () => {
    $("progress").hidden = progress.part === null;
    $("progress").value = progress.part ?? 0;
    $("status").textContent = progress.shown(performance.now());
    announce(progress.spoken);
  };
  refresh();
  const timer = setInterval(refresh, REFRESH_MS);
  try {
    if (!model) await getModel();
    const sent = [...(system ? [{role: "system", content: system}] : []), ...chat, user];
    const body = {model, messages: sent, stream: true, return_progress: true};
    const response = await call("/v1/chat/completions", body, controller.signal);
    for await (const event of events(response)) {
      progress.add(event, performance.now());
      if (event.queue || event.prompt_progress) refresh();
      turn.add(event.choices[0]?.delta ?? {});
      timings = event.timings ?? timings;
      reason = event.choices[0]?.finish_reason ?? reason;
    }
    if (!reason) throw new Error("The connection to the server was lost.");
    if (reason === "length") note = "Cut off at the limit of tokens: ask the model to go on.";
  } catch (error) {
    note = error.name === "AbortError" ? "Stopped." : "Broken off.";
    if (chat === messages && error.name !== "AbortError") fail(error);
  } finally {
    clearInterval(timer);
    if (running === controller) {
      running = null;
      showRunning(false);
    }
  }
  if (chat !== messages) return;  // a new conversation has begun
  if (!reason && !turn.begun) {
    turn.element.remove();
    asked = asked.filter(entry => !attached.includes(entry));
    documents.putBack(attached);
    $("question").value = [question, $("question").value].filter(Boolean).join("\n");
    announce(note);
    return;
  }
  turn.end([note, timings && timingsInWords(timings)]);
  if (following) scrollToEnd();
  announce(note || "The answer is complete.");
  chat.push(user, {role: "assistant", content: turn.answer});
}

// ------------------------------------------------------------------------------------------------- status

function showRunning(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (is) return;
  $("progress").hidden = true;
  $("status").textContent = "";
}

/** Shows what went wrong; "": nothing did. */
function tell(problem) { $("problem").textContent = problem; }

function fail(error) {
  tell(error.message);
  if (error.status !== 401) return;
  $("key").hidden = false;
  $("key").focus();
}

/** Has a screen reader say something, once. */
function announce(text) {
  if ($("announcer").textContent !== text) $("announcer").textContent = text;
}

const page = document.documentElement;
let following = true;  // until the reader scrolls up
function scrollToEnd() {
  page.scrollTop = page.scrollHeight;
  following = true;
}
addEventListener("scroll", () => { following = page.scrollHeight - page.scrollTop - page.clientHeight < 50; });
new ResizeObserver(() => running && following && scrollToEnd()).observe($("chat"));

async function copy(button, text) {
  button.textContent = await copied(text) ? "Copied" : "Not copied: select the text";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

/** Copies a text and returns whether it could; browsers offer `navigator.clipboard` only over https or on this machine. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", "spoken");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

// --------------------------------------------------------------------------------------------- components

async function getModel() {
  const response = await call("/v1/models");
  const {id, max_model_len: positions} = (await response.json()).data[0];
  model = id;
  $("model").textContent = `${id}, up to ${positions.toLocaleString("en")} tokens`;
}

async function open(files) {
  if (!files.length) return;
  if (messages.length || running) {
    const choice = await choose([...files].map(file => file.name).join(", "));
    focusQuestion();
    if (choice === "cancel") return;
    if (choice === "anew") {
      startAnew();
      documents.take();
    }
  }
  tell("");
  documents.add(files);
  focusQuestion();
}

/** Puts the cursor behind what has been typed; a closed dialog returns the focus, but in Chromium without a cursor. */
function focusQuestion() {
  const question = $("question");
  question.focus();
  question.setSelectionRange(question.value.length, question.value.length);
}

/** Asks what files opened during a conversation are for: "add", "anew" or "cancel". */
function choose(names) {
  $("adding-files").textContent = `Is ${names} a part of it?`;
  $("adding").returnValue = "cancel";  // what Escape means
  $("adding").showModal();
  return new Promise(resolve => {
    $("adding").addEventListener("close", () => resolve($("adding").returnValue || "cancel"), {once: true});
  });
}

function showSystemPrompt() { $("system-set").textContent = $("system").value.trim() ? "(set)" : ""; }

/** Browsers may forbid to keep anything. */
function stored(access) {
  try { return access(localStorage); } catch { return null; }
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || running) return;
  if (documents.problem) {
    tell(documents.problem);
    return;
  }
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("file").addEventListener("change", async event => {
  const files = [...event.target.files];
  event.target.value = "";  // so that the same file can be opened again
  await open(files);
});
document.addEventListener("dragover", event => event.preventDefault());
document.addEventListener("drop", event => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();  // a browser would leave the page for the file
  open([...event.dataTransfer.files]);
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  const again = asked;
  startAnew();
  documents.putBack(again);
  focusQuestion();
});
for (const button of $("adding").querySelectorAll("button")) {
  button.addEventListener("click", () => $("adding").close(button.value));
}
$("chat").addEventListener("click", event => {
  const button = event.target.closest(".code .copy");
  if (button) copy(button, button.closest(".code").querySelector("code").textContent);
});
$("system").value = stored(storage => storage.getItem(SYSTEM_PROMPT)) ?? "";
showSystemPrompt();
$("system").addEventListener("input", () => {
  stored(storage => storage.setItem(SYSTEM_PROMPT, $("system").value));
  showSystemPrompt();
});
$("key").addEventListener("change", () => {
  useKey($("key").value);
  tell("");
  getModel().then(() => documents.retry()).catch(fail);
});
getModel().catch(fail);
