/** Shows Markdown while it arrives: no raw HTML, no pictures, and links only to http, https and mailto. */

import MarkdownIt from "./markdown-it.min.js";

const markdown = new MarkdownIt({html: false, linkify: true});
markdown.linkify.set({fuzzyLink: false, fuzzyEmail: false});
markdown.validateLink = url => /^(https?:|mailto:)/i.test(url);

const escaped = text => markdown.utils.escapeHtml(text);

markdown.core.ruler.push("attributes", ({tokens}) => {
  for (const token of tokens) {
    if (token.type.startsWith("heading_")) token.tag = `h${Math.min(6, Number(token.tag[1]) + 2)}`;  // below those of the page
    const style = token.attrGet("style");  // of cells; the page's policy forbids styles in attributes
    if (style) token.attrs = [["class", style.replace("text-align:", "align-")]];
    for (const child of token.children ?? []) {
      if (child.type === "link_open") child.attrs.push(["target", "_blank"], ["rel", "noopener noreferrer"]);
    }
  }
});

Object.assign(markdown.renderer.rules, {
  table_open: () => '<div class="table" tabindex="0"><table>',
  table_close: () => "</table></div>",
  image: (tokens, at, options, env, renderer) =>
    `<span class="quiet">[image: ${escaped(renderer.renderInlineAsText(tokens[at].children, options, env))}]</span>`,
  fence: code,
  code_block: code,
});

function code(tokens, at) {
  const language = tokens[at].info.trim().split(/\s/)[0];
  return `<div class="code"><div class="row"><span class="quiet">${escaped(language)}</span>` +
    '<button type="button" class="copy right" aria-label="Copy code">Copy</button></div>' +
    `<pre tabindex="0"><code>${escaped(tokens[at].content)}</code></pre></div>`;
}

/**
 * Markdown in an element. While text is appended, only the last block is rendered anew: those before it cannot change any more.
 */
export class MarkdownView {
  source = "";
  #element;
  #tail = document.createElement("div");
  #settled = 0;  // characters of the source whose blocks are rendered for good
  #scheduled = false;
  #renderMs = 0;

  constructor(element) {
    this.#element = element;
    this.#tail.className = "tail";
    element.append(this.#tail);
  }

  append(text) {
    this.source += text;
    if (this.#scheduled) return;
    this.#scheduled = true;
    // A long last block takes its time: most of the processor's is left to the rest of the page.
    setTimeout(() => requestAnimationFrame(() => this.#scheduled && this.#render()), 4 * this.#renderMs);
  }

  /** Renders what has been appended; links whose references other blocks define become links only now. */
  finish() {
    this.#render();
    const env = {};
    const html = markdown.render(this.source, env);
    if (Object.keys(env.references ?? {}).length) this.#element.innerHTML = html;
  }

  #render() {
    this.#scheduled = false;
    const began = performance.now();
    const complete = this.source.slice(this.#settled, this.source.lastIndexOf("\n") + 1);
    const end = lastBlock(complete);
    if (end) {
      this.#tail.insertAdjacentHTML("beforebegin", markdown.render(complete.slice(0, end)));
      this.#settled += end;
    }
    this.#tail.innerHTML = markdown.render(this.source.slice(this.#settled));
    this.#renderMs = performance.now() - began;
  }
}

/** Returns where the last block of complete lines of Markdown begins, in characters. */
function lastBlock(text) {
  const blocks = markdown.parse(text, {}).filter(token => token.level === 0 && token.nesting >= 0 && token.map);
  const line = blocks.at(-1)?.map[0] ?? 0;
  const breaks = /\r\n?|\n/g;
  for (let at = 0; at < line; at += 1) breaks.exec(text);
  return breaks.lastIndex;
}
