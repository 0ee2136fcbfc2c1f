// Markdown to elements, for text nobody vouches for: every piece of it becomes a text node, never markup. Links are kept only when
// they lead to http, https or mailto. Understood: headings, paragraphs, fenced code, lists, quotes, tables, rules; code, strong,
// emphasis, struck text and links in a line.
'use strict';

const markdown = (() => {
  function make(tag, text, name) {
    const e = document.createElement(tag);
    if (text !== undefined) e.textContent = text;
    if (name) e.className = name;
    return e;
  }

  // One expression, tried from left to right; alternatives cannot nest without end: what is inside is a shorter string.
  const mark = /(`+)([^`](?:[\s\S]*?[^`])?)\1(?!`)|\*\*(\S(?:[\s\S]*?\S)?)\*\*|~~(\S(?:[\s\S]*?\S)?)~~|\*(\S(?:[^*\n]*\S)?)\*|\b_(\S(?:[^_\n]*\S)?)_\b|\[([^\]\n]+)\]\(([^()\s]+)\)|(https?:\/\/[^\s<>()"']+[^\s<>()"'.,;:!?])/g;

  function inline(to, text, depth) {
    let at = 0;
    if (depth > 4) { to.append(text); return to; }
    for (const m of text.matchAll(mark)) {
      if (m.index > at) to.append(text.slice(at, m.index));
      at = m.index + m[0].length;
      if (m[2] !== undefined) to.append(make('code', m[2]));
      else if (m[3] !== undefined) to.append(inline(make('strong'), m[3], depth + 1));
      else if (m[4] !== undefined) to.append(inline(make('s'), m[4], depth + 1));
      else if (m[5] !== undefined) to.append(inline(make('em'), m[5], depth + 1));
      else if (m[6] !== undefined) to.append(inline(make('em'), m[6], depth + 1));
      else to.append(link(m[8] === undefined ? m[9] : m[8], m[7] === undefined ? m[9] : m[7], m[0]));
    }
    to.append(text.slice(at));
    return to;
  }

  function link(target, text, whole) {
    if (!/^(https?:\/\/|mailto:)/i.test(target)) return document.createTextNode(whole);
    const a = make('a', text);
    a.href = target;
    a.target = '_blank';
    a.rel = 'noopener noreferrer nofollow';
    return a;
  }

  function copyButton(text) {
    const b = make('button', 'Copy', 'small copy');
    b.type = 'button';
    b.addEventListener('click', async () => {
      try {
        await navigator.clipboard.writeText(text());
        b.textContent = 'Copied';
      } catch {
        b.textContent = 'No access';
      }
      setTimeout(() => { b.textContent = 'Copy'; }, 1500);
    });
    return b;
  }

  const fence = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/, item = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/, rule = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
  const row = (s) => s.trim().replace(/^\||\|$/g, '').split(/(?<!\\)\|/).map((c) => c.trim().replace(/\\\|/g, '|'));
  const isTable = (lines, i) => lines[i].includes('|') && i + 1 < lines.length && /^[\s|:-]*-[\s|:-]*$/.test(lines[i + 1]) && lines[i + 1].includes('|');
  const starts = (lines, i) => fence.test(lines[i]) || /^#{1,6}\s/.test(lines[i]) || item.test(lines[i]) || /^ {0,3}>/.test(lines[i]) || rule.test(lines[i]) || isTable(lines, i);

  // The text as blocks: {kind, source}, so that a text that grows changes its last blocks only.
  function blocks(text) {
    const lines = text.replace(/\r\n?/g, '\n').split('\n'), out = [];
    for (let i = 0; i < lines.length;) {
      if (!lines[i].trim()) { i++; continue; }
      const from = i, f = fence.exec(lines[i]);
      let kind = 'p';
      if (f) {
        kind = 'code';
        for (i++; i < lines.length && !(lines[i].trim().startsWith(f[1]) && !lines[i].trim().slice(f[1].length).replace(/[`~]/g, '').trim()); i++);
        i++;
      } else if (/^#{1,6}\s/.test(lines[i])) { kind = 'h'; i++; }
      else if (rule.test(lines[i])) { kind = 'hr'; i++; }
      else if (item.test(lines[i])) {
        kind = 'list';
        for (i++; i < lines.length && (item.test(lines[i]) || /^\s+\S/.test(lines[i]) || (!lines[i].trim() && i + 1 < lines.length && (item.test(lines[i + 1]) || /^\s{2,}\S/.test(lines[i + 1])))); i++);
      } else if (/^ {0,3}>/.test(lines[i])) { kind = 'quote'; for (i++; i < lines.length && /^ {0,3}>/.test(lines[i]); i++); }
      else if (isTable(lines, i)) { kind = 'table'; for (i += 2; i < lines.length && lines[i].includes('|'); i++); }
      else for (i++; i < lines.length && lines[i].trim() && !starts(lines, i); i++);
      out.push({ kind, source: lines.slice(from, i).join('\n') });
    }
    return out;
  }

  function list(lines) {
    const first = item.exec(lines[0]), indent = first[1].length, ordered = /\d/.test(first[2]);
    const el = make(ordered ? 'ol' : 'ul');
    if (ordered) el.start = parseInt(first[2], 10);
    let inner = [];
    const flush = () => {
      if (!inner.length) return;
      const li = make('li'), head = [];
      while (inner.length && inner[0].trim() && !item.test(inner[0]) && !fence.test(inner[0].trim())) head.push(inner.shift().trim());
      inline(li, head.join('\n'), 0);
      if (inner.length) {
        const cut = Math.min(...inner.filter((s) => s.trim()).map((s) => s.length - s.trimStart().length));
        for (const b of blocks(inner.map((s) => s.slice(Math.min(cut, s.length))).join('\n'))) li.append(block(b));
      }
      el.append(li);
    };
    for (const s of lines) {
      const m = item.exec(s);
      if (m && m[1].length <= indent) { flush(); inner = [m[3]]; } else inner.push(s);
    }
    flush();
    return el;
  }

  function table(lines) {
    const box = make('div', undefined, 'scroll'), el = make('table'), head = row(lines[0]);
    const tr = make('tr');
    for (const c of head) tr.append(inline(make('th'), c, 0));
    el.append(tr);
    for (const s of lines.slice(2)) {
      const r = make('tr');
      row(s).slice(0, head.length).forEach((c) => r.append(inline(make('td'), c, 0)));
      el.append(r);
    }
    box.append(el);
    return box;
  }

  function code(source) {
    const lines = source.split('\n'), f = fence.exec(lines[0]), last = lines[lines.length - 1];
    const closed = lines.length > 1 && last.trim().startsWith(f[1]);
    const text = lines.slice(1, closed ? -1 : undefined).join('\n');
    const fig = make('figure', undefined, 'code'), cap = make('figcaption', f[2].trim()), pre = make('pre');
    cap.append(copyButton(() => text));
    pre.append(make('code', text));
    pre.tabIndex = 0;
    fig.append(cap, pre);
    return fig;
  }

  function block(b) {
    const lines = b.source.split('\n');
    switch (b.kind) {
      case 'code': return code(b.source);
      case 'h': return inline(make('h' + Math.min(4, Math.max(2, lines[0].search(/[^#]/) + 1))), lines[0].replace(/^#+\s+|\s+#+$/g, ''), 0);
      case 'hr': return make('hr');
      case 'list': return list(lines);
      case 'table': return table(lines);
      case 'quote': {
        const q = make('blockquote');
        for (const inner of blocks(lines.map((s) => s.replace(/^ {0,3}> ?/, '')).join('\n'))) q.append(inner.kind === 'quote' ? make('p', inner.source) : block(inner));
        return q;
      }
      default: {
        const p = make('p');
        lines.forEach((s, i) => {
          if (i) p.append(make('br'));
          inline(p, s, 0);
        });
        return p;
      }
    }
  }

  // Makes `to` show the text; children whose source has not changed stay as they are.
  function render(to, text) {
    const list = blocks(text), old = to.blocks || [];
    let same = 0;
    while (same < list.length && same < old.length && list[same].source === old[same].source) same++;
    while (to.childNodes.length > same) to.lastChild.remove();
    for (const b of list.slice(same)) to.append(block(b));
    to.blocks = list;
  }

  return { render, make, copyButton };
})();
