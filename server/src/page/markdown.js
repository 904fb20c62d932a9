// Markdown of answers as elements. Text of a model becomes text nodes only, never markup.

import {button, copy, complain, make, say} from "./dom.js";

/** Longest text that is searched for emphasis, and deepest lists and quotes. */
const MAX_INLINE = 20_000, MAX_DEPTH = 6;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}#{1,6}\s+(.*)$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])(?:\s+(.*)|$)/;
const DIVIDER = /^[\s|:-]*-[\s|:-]*$/;

/** Shows a text in an element. Blocks that did not change stay as they are, so that a stream costs little. */
export function show(element, text) {
  const blocks = parse(text.split("\n"), 0);
  const shown = element.blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && blocks[same].source === shown[same]) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...blocks.slice(same).map(block => block.build()));
  element.blocks = blocks.map(block => block.source);
}

function parse(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    const start = at, line = lines[at];
    const add = build => blocks.push({source: lines.slice(start, at).join("\n"), build});
    const fence = FENCE.exec(line), heading = HEADING.exec(line), item = ITEM.exec(line);
    if (!line.trim()) {
      at++;
    } else if (fence) {
      const end = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},}\\s*$`), code = [];
      for (at++; at < lines.length && !end.test(lines[at]); at++) code.push(lines[at]);
      at++;
      add(() => program(code.join("\n"), fence[2]));
    } else if (heading) {
      at++;
      add(() => make("h4", {}, ...inline(heading[1])));
    } else if (RULE.test(line)) {
      at++;
      add(() => make("hr"));
    } else if (line.startsWith(">") && depth < MAX_DEPTH) {
      const inner = [];
      for (; at < lines.length && lines[at].startsWith(">"); at++) inner.push(lines[at].replace(/^> ?/, ""));
      add(() => make("blockquote", {}, ...parse(inner, depth + 1).map(block => block.build())));
    } else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) {
      const rows = [cells(line)];
      for (at += 2; at < lines.length && lines[at].includes("|"); at++) rows.push(cells(lines[at]));
      add(() => table(rows));
    } else if (item && depth < MAX_DEPTH) {
      const ordered = /\d/.test(item[2]), items = [];
      for (let next; at < lines.length; at++) {
        next = ITEM.exec(lines[at]);
        if (next && next[1].length <= item[1].length + 1) {
          if (/\d/.test(next[2]) !== ordered) break;
          items.push([next[3] ?? ""]);
        } else if (lines[at].trim() && !/^\s/.test(lines[at]) && (!lines[at - 1]?.trim() || begins(lines[at]))) {
          break;
        } else {
          items.at(-1).push(lines[at].replace(new RegExp(`^ {0,${item[1].length + item[2].length + 1}}`), ""));
        }
      }
      while (!lines[at - 1].trim()) at--;
      add(() => list(items, ordered, parseInt(item[2], 10), depth));
    } else {
      for (at++; at < lines.length && lines[at].trim() && !begins(lines[at]); at++);
      const text = lines.slice(start, at).join("\n");
      add(() => make("p", {}, ...inline(text)));
    }
  }
  return blocks;
}

/** True for a line that begins a block of its own within a paragraph. */
function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || line.startsWith(">") || RULE.test(line);
}

function list(items, ordered, first, depth) {
  const entries = items.map(lines => {
    const blocks = parse(lines, depth + 1).map(block => block.build());
    // An item of one paragraph is no paragraph.
    if (blocks[0]?.tagName === "P") blocks.splice(0, 1, ...blocks[0].childNodes);
    return make("li", {}, ...blocks);
  });
  return make(ordered ? "ol" : "ul", ordered && first !== 1 ? {start: first} : {}, ...entries);
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());
}

function table([head, ...rows]) {
  const row = (cells, tag) =>
    make("tr", {}, ...head.map((_, at) => make(tag, tag === "th" ? {scope: "col"} : {}, ...inline(cells[at] ?? ""))));
  const table = make("table", {}, make("thead", {}, row(head, "th")),
    make("tbody", {}, ...rows.map(cells => row(cells, "td"))));
  return make("div", {className: "scroll", tabIndex: 0, role: "region", "aria-label": "Table"}, table);
}

function program(code, language) {
  const take = button("Copy code", () => copy(code).then(() => say("The code is copied."),
    error => complain(`The code cannot be copied: ${error.message}`)));
  const name = `Code ${language}`.trim();
  const text = make("pre", {tabIndex: 0, role: "region", "aria-label": name}, make("code", {}, code));
  return make("div", {className: "code"}, make("div", {className: "row"}, make("span", {}, language || "code"), take),
    text);
}

const SPANS = new RegExp([
  "(?<ticks>`+)(?<code>.+?)(?<!`)\\k<ticks>(?!`)",
  "\\*\\*(?=\\S)(?<bold>.+?)(?<=\\S)\\*\\*",
  "~~(?=\\S)(?<struck>.+?)~~",
  "\\*(?=[^\\s*])(?<star>[^*]+?)(?<=\\S)\\*(?!\\*)",
  "(?<![\\w_])_(?=[^\\s_])(?<line>[^_]+?)(?<=\\S)_(?![\\w_])",
  "\\[(?<label>[^\\]\\n]+)\\]\\((?<to>https?://[^\\s)]+)\\)",
  "(?<link>https?://[^\\s<>\"'`)\\]]*[^\\s<>\"'`)\\].,;:!?])",
].join("|"), "gs");

/** Nodes of a text with code, emphasis and links. */
function inline(text, depth = 0) {
  if (text.length > MAX_INLINE || depth > 3) return [text];
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(SPANS)) {
    const {code, bold, struck, star, line, label, to, link} = match.groups;
    const within = text => inline(text, depth + 1);
    nodes.push(text.slice(from, match.index));
    from = match.index + match[0].length;
    if (code !== undefined) nodes.push(make("code", {}, code.replace(/^ (.*) $/s, "$1")));
    else if (bold) nodes.push(make("strong", {}, ...within(bold)));
    else if (struck) nodes.push(make("s", {}, ...within(struck)));
    else if (star ?? line) nodes.push(make("em", {}, ...within(star ?? line)));
    else nodes.push(make("a", {href: to ?? link, target: "_blank", rel: "noopener noreferrer"}, label ?? link));
  }
  nodes.push(text.slice(from));
  return nodes.filter(node => node !== "");
}
