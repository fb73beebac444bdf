'use strict';
/* The part of Markdown that models write, as elements. Whatever is not understood stays the text it is; HTML is never understood. */

const markdown = (() => {
  const SAFE_LINK = /^(https?:\/\/|mailto:)/i;
  const MAX_DEPTH = 6;
  /* Each marker, and the element that it makes of what stands between two of it. */
  const PAIRS = [['**', 'strong'], ['__', 'strong'], ['~~', 's'], ['*', 'em'], ['_', 'em']];
  const isWord = (character) => character !== undefined && /[\p{L}\p{N}_]/u.test(character);

  /** Nodes of a line or more of text. */
  function inline(text, depth = 0) {
    const nodes = [];
    let plain = '';
    const flush = () => {
      if (plain) nodes.push(document.createTextNode(plain));
      plain = '';
    };
    let at = 0;
    while (at < text.length) {
      const found = depth < MAX_DEPTH ? special(text, at, depth) : null;
      if (found) {
        flush();
        nodes.push(found.node);
        at = found.end;
      } else {
        const isEscaped = text[at] === '\\' && /[\\`*_{}[\]()#+\-.!~>|]/.test(text[at + 1] ?? '');
        if (isEscaped) at += 1;
        plain += text[at];
        at += 1;
      }
    }
    flush();
    return nodes;
  }

  function special(text, at, depth) {
    const character = text[at];
    if (character === '\n') return { node: make('br'), end: at + 1 };
    if (character === '`') return code(text, at);
    if (character === '[') return link(text, at, depth);
    if (character === 'h' && !isWord(text[at - 1])) return address(text, at);
    if ('*_~'.includes(character)) return pair(text, at, depth);
    return null;
  }

  function code(text, at) {
    let ticks = 1;
    while (text[at + ticks] === '`') ticks += 1;
    const fence = '`'.repeat(ticks);
    const end = text.indexOf(fence, at + ticks);
    if (end < 0) return null;
    return { node: make('code', { text: text.slice(at + ticks, end).trim() }), end: end + ticks };
  }

  function pair(text, at, depth) {
    for (const [marker, tag] of PAIRS) {
      if (!text.startsWith(marker, at)) continue;
      const start = at + marker.length;
      if (/\s/.test(text[start] ?? ' ') || (marker[0] === '_' && isWord(text[at - 1]))) continue;
      let end = text.indexOf(marker, start + 1);
      while (end > 0 && (/\s/.test(text[end - 1]) || (marker[0] === '_' && isWord(text[end + marker.length])))) {
        end = text.indexOf(marker, end + 1);
      }
      if (end > 0) return { node: make(tag, {}, ...inline(text.slice(start, end), depth + 1)), end: end + marker.length };
    }
    return null;
  }

  function link(text, at, depth) {
    const middle = text.indexOf('](', at);
    const end = middle < 0 ? -1 : text.indexOf(')', middle);
    if (end < 0 || text.slice(at, middle).includes('\n')) return null;
    const [target] = text.slice(middle + 2, end).trim().split(/\s/, 1);
    if (!SAFE_LINK.test(target)) return null;
    return { node: anchor(target, inline(text.slice(at + 1, middle), depth + 1)), end: end + 1 };
  }

  function address(text, at) {
    if (!text.startsWith('http://', at) && !text.startsWith('https://', at)) return null;
    let end = at;
    while (end < text.length && !/[\s<>"'`)\]]/.test(text[end])) end += 1;
    while (/[.,;:!?*_]/.test(text[end - 1])) end -= 1;
    const target = text.slice(at, end);
    return { node: anchor(target, [document.createTextNode(target)]), end };
  }

  const anchor = (target, children) =>
    make('a', { href: target, target: '_blank', rel: 'noopener noreferrer nofollow' }, ...children);

  /** Elements of a whole text. */
  function blocks(text, depth = 0) {
    const lines = text.replace(/\r\n?/g, '\n').split('\n');
    const found = [];
    let at = 0;
    while (at < lines.length) {
      if (!lines[at].trim()) {
        at += 1;
        continue;
      }
      const taken = fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? quote(lines, at, depth) ?? table(lines, at)
        ?? list(lines, at, depth) ?? paragraph(lines, at);
      found.push(taken.node);
      at = taken.end;
    }
    return found;
  }

  function fence(lines, at) {
    const opened = /^\s{0,3}(`{3,}|~{3,})\s*([^`]*)$/.exec(lines[at]);
    if (!opened) return null;
    let end = at + 1;
    while (end < lines.length && !lines[end].trim().startsWith(opened[1])) end += 1;
    const content = lines.slice(at + 1, end).join('\n');
    const copy = make('button', { class: 'quiet', type: 'button', text: 'Copy', onclick: () => copyText(content, copy) });
    const head = make('div', { class: 'head' }, make('span', { text: opened[2].trim() || 'text' }), copy);
    return { node: make('div', { class: 'code' }, head, make('pre', { tabindex: '0' }, make('code', { text: content }))), end: end + 1 };
  }

  async function copyText(text, button) {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = 'Copied';
    } catch {
      button.textContent = 'Not allowed';
    }
    setTimeout(() => { button.textContent = 'Copy'; }, 1500);
  }

  function heading(lines, at) {
    const found = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*$/.exec(lines[at]);
    if (!found) return null;
    /* The page has the first two levels. */
    return { node: make(`h${Math.min(found[1].length + 2, 5)}`, {}, ...inline(found[2])), end: at + 1 };
  }

  function rule(lines, at) {
    return /^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(lines[at]) ? { node: make('hr'), end: at + 1 } : null;
  }

  function quote(lines, at, depth) {
    if (!/^\s{0,3}>/.test(lines[at]) || depth >= MAX_DEPTH) return null;
    let end = at;
    const inner = [];
    while (end < lines.length && /^\s{0,3}>/.test(lines[end])) {
      inner.push(lines[end].replace(/^\s{0,3}> ?/, ''));
      end += 1;
    }
    return { node: make('blockquote', {}, ...blocks(inner.join('\n'), depth + 1)), end };
  }

  const cells = (line) => line.trim().replace(/^\||\|$/g, '').split('|').map((cell) => cell.trim());

  function table(lines, at) {
    const isRow = (line) => line !== undefined && line.includes('|');
    if (!isRow(lines[at]) || !/^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[at + 1] ?? '') || !isRow(lines[at + 1])) return null;
    let end = at + 2;
    const body = [];
    while (isRow(lines[end])) {
      body.push(make('tr', {}, ...cells(lines[end]).map((cell) => make('td', {}, ...inline(cell)))));
      end += 1;
    }
    const head = make('tr', {}, ...cells(lines[at]).map((cell) => make('th', { scope: 'col' }, ...inline(cell))));
    const whole = make('table', {}, make('thead', {}, head), make('tbody', {}, ...body));
    return { node: make('div', { class: 'table-scroll', tabindex: '0', role: 'region', 'aria-label': 'Table' }, whole), end };
  }

  const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

  function list(lines, at, depth) {
    const first = ITEM.exec(lines[at]);
    if (!first || depth >= MAX_DEPTH) return null;
    const isOrdered = /\d/.test(first[2]);
    const items = [];
    let end = at;
    while (end < lines.length) {
      const item = ITEM.exec(lines[end]);
      const isNext = item && item[1].length <= first[1].length + 1 && /\d/.test(item[2]) === isOrdered;
      if (isNext) items.push([item[3]]);
      else if (/^\s{2,}\S/.test(lines[end])) items.at(-1).push(lines[end].slice(Math.min(first[1].length + 2, lines[end].search(/\S/))));
      else if (lines[end].trim() || !ITEM.test(lines[end + 1] ?? '')) break;
      end += 1;
    }
    const children = items.map((item) => {
      const [head, ...rest] = item;
      return make('li', {}, ...inline(head), ...blocks(rest.join('\n'), depth + 1));
    });
    const start = isOrdered ? parseInt(first[2], 10) : 1;
    return { node: make(isOrdered ? 'ol' : 'ul', { start: start === 1 ? null : start }, ...children), end };
  }

  function paragraph(lines, at) {
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && !/^\s{0,3}(#{1,6}\s|>|`{3,}|~{3,})/.test(lines[end]) && !ITEM.test(lines[end])) end += 1;
    return { node: make('p', {}, ...inline(lines.slice(at, end).join('\n').trim())), end };
  }

  return { blocks };
})();
