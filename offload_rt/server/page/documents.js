/** The files of the next question: the server reads their text, in an encoding that the user may choose. */

import {call} from "./api.js";

const DECLARE_THEIR_OWN = /\.(pdf|epub)$/i;

export class Documents {
  #list;
  #entries = [];

  constructor(list) { this.#list = list; }

  /** Adds files, and begins to read them. */
  add(files) {
    this.#entries.push(...[...files].map(file => new AttachedFile(file, entry => this.#remove(entry))));
    this.#show();
  }

  /** Puts documents that were taken back before the others. */
  putBack(entries) {
    this.#entries = [...entries, ...this.#entries];
    this.#show();
  }

  /** Reads those again that could not be read. */
  retry() { this.#entries.filter(entry => entry.error).forEach(entry => entry.read()); }

  /** Returns the documents, and has none any more. */
  take() {
    const taken = this.#entries;
    this.#entries = [];
    this.#show();
    return taken;
  }

  /** Why they cannot be sent; null: they can. */
  get problem() {
    const failed = this.#entries.find(entry => entry.error);
    if (failed) return `${failed.name} could not be read: choose its encoding, or remove it.`;
    const reading = this.#entries.find(entry => entry.text === null);
    return reading ? `${reading.name} is still being read: ask again in a moment.` : null;
  }

  #remove(entry) {
    this.#entries = this.#entries.filter(other => other !== entry);
    this.#show();
  }

  #show() { this.#list.replaceChildren(...this.#entries.map(entry => entry.element)); }
}

/** A file and its text; `error` says why there is none. */
class AttachedFile {
  text = null;
  error = null;
  element = document.createElement("li");
  #file;
  #size = Object.assign(document.createElement("span"), {className: "quiet"});
  #notices = Object.assign(document.createElement("div"), {className: "notices quiet"});
  #error = Object.assign(document.createElement("div"), {className: "error"});
  #encoding = Object.assign(document.createElement("input"), {placeholder: "automatic", autocomplete: "off", spellcheck: false});
  #reading = null;

  constructor(file, onRemove) {
    this.#file = file;
    const row = Object.assign(document.createElement("div"), {className: "row"});
    const remove = Object.assign(document.createElement("button"), {type: "button", className: "right", textContent: "×"});
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    remove.addEventListener("click", () => {
      this.#reading?.abort();
      onRemove(this);
    });
    row.append(Object.assign(document.createElement("span"), {className: "name", textContent: file.name}), this.#size);
    if (!DECLARE_THEIR_OWN.test(file.name)) {
      const label = Object.assign(document.createElement("label"), {className: "quiet", textContent: "Encoding "});
      this.#encoding.setAttribute("list", "encodings");
      this.#encoding.setAttribute("aria-label", `Encoding of ${file.name}`);
      this.#encoding.addEventListener("change", () => this.read());
      this.#encoding.addEventListener("keydown", event => {
        if (event.key !== "Enter") return;
        event.preventDefault();  // which would send the question
        this.#encoding.blur();
      });
      label.append(this.#encoding);
      row.append(label);
    }
    row.append(remove);
    this.#error.setAttribute("role", "alert");
    this.element.append(row, this.#error, this.#notices);
    this.read();
  }

  get name() { return this.#file.name; }

  async read() {
    this.#reading?.abort();
    const reading = this.#reading = new AbortController();
    this.#show(null, null, []);
    try {
      const data = await base64(this.#file);
      const encoding = this.#encoding.value.trim() || null;
      const response = await call("/document", {name: this.name, data, encoding}, reading.signal);
      const {text, notices} = await response.json();
      if (!reading.signal.aborted) this.#show(text, null, notices);
    } catch (error) {
      if (!reading.signal.aborted) this.#show(null, error.message, []);
    }
  }

  #show(text, error, notices) {
    this.text = text;
    this.error = error;
    this.element.className = error ? "failed" : "";
    this.#size.textContent = error ? "" : text === null ? "reading …" : `${text.length.toLocaleString("en")} characters`;
    this.#error.textContent = error ?? "";
    this.#notices.textContent = notices.join("\n");
    if (error) this.element.scrollIntoView({block: "nearest"});
  }
}

/** Returns the content of a file in base64. */
function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.split(",")[1] ?? "");
    reader.onerror = () => reject(new Error(`${file.name} cannot be opened: it may be a folder, or have been moved.`));
    reader.readAsDataURL(file);
  });
}

/**
 * Returns a question with its documents before it, so that all questions share their KV.
 *
 * A document has its name as a heading unless it is the only one of the conversation.
 */
export function withDocuments(documents, question, named) {
  const texts = documents.map(({name, text}) => named || documents.length > 1 ? `# ${name}\n\n${text}` : text);
  return [...texts, question].join("\n\n");
}
