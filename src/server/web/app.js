// The chat: a conversation in this browser, sent whole with every request to /v1/chat/completions, answered as a stream.
'use strict';

(() => {
  const { make, render, copyButton } = markdown;
  const $ = (id) => document.getElementById(id);
  const numbers = ['temperature', 'top_p', 'top_k', 'min_p', 'seed', 'max_tokens'], texts = ['system', 'tools'];
  let messages = [], context = 0, running = null; // running: the request's AbortController

  // ---- what is kept ----

  const load = (key, otherwise) => {
    try { return JSON.parse(localStorage.getItem(key)) || otherwise; } catch { return otherwise; }
  };
  const store = (key, value) => {
    try { localStorage.setItem(key, JSON.stringify(value)); } catch { /* full or forbidden: then not */ }
  };
  const keepChat = () => store('affinity.chat', messages);

  function keepSettings() {
    const s = { effort: $('effort').value };
    for (const k of [...numbers, ...texts]) s[k] = $(k).value;
    store('affinity.settings', s);
    try { sessionStorage.setItem('affinity.key', $('key').value); } catch { /* the same */ }
  }

  function loadSettings() {
    const s = load('affinity.settings', {});
    if (s.effort) $('effort').value = s.effort;
    for (const k of [...numbers, ...texts]) if (typeof s[k] === 'string') $(k).value = s[k];
    try { $('key').value = sessionStorage.getItem('affinity.key') || ''; } catch { /* the same */ }
  }

  const headers = () => ($('key').value ? { Authorization: 'Bearer ' + $('key').value } : {});

  // ---- the request ----

  function tools() {
    const text = $('tools').value.trim(), error = $('tools-error');
    error.hidden = true;
    if (!text) return undefined;
    try {
      const v = JSON.parse(text);
      if (!Array.isArray(v)) throw new Error('expected an array');
      return v.length ? v : undefined;
    } catch (e) {
      error.textContent = 'Tools: ' + e.message;
      error.hidden = false;
      panel('settings', true);
      throw new Error('Tools in the settings are no JSON array.');
    }
  }

  function request() {
    const body = { messages: [], stream: true, stream_options: { include_usage: true } };
    const effort = $('effort').value;
    if (effort === 'none') body.thinking = { type: 'disabled' };
    else body.reasoning_effort = effort;
    for (const k of numbers) if ($(k).value !== '' && $(k).checkValidity()) body[k] = Number($(k).value);
    if ($('system').value.trim()) body.messages.push({ role: 'system', content: $('system').value });
    for (const m of messages) {
      if (m.role !== 'assistant') { body.messages.push({ role: m.role, content: m.content, tool_call_id: m.tool_call_id }); continue; }
      if (!m.content && !m.reasoning && !(m.calls && m.calls.length)) continue; // nothing came
      const out = { role: 'assistant', content: m.content };
      if (m.reasoning) out.reasoning_content = m.reasoning;
      if (m.calls && m.calls.length) {
        out.tool_calls = m.calls.map((c) => ({ id: c.id, type: 'function', function: { name: c.name, arguments: c.arguments } }));
      }
      body.messages.push(out);
    }
    const list = tools();
    if (list) body.tools = list;
    return body;
  }

  // Calls on(event) for the data of every event; comments, which are heartbeats, are left out.
  async function events(response, on) {
    const reader = response.body.getReader(), decoder = new TextDecoder();
    let held = '';
    for (;;) {
      const { value, done } = await reader.read();
      held += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const lines = held.split('\n');
      held = lines.pop();
      for (const line of lines) {
        const data = line.startsWith('data: ') ? line.slice(6).trim() : '';
        if (data && data !== '[DONE]') on(JSON.parse(data));
      }
      if (done) return;
    }
  }

  function take(m, e) {
    if (e.error) throw new Error(e.error.message || 'The server reported an error.');
    if (e.usage) m.usage = e.usage;
    const c = e.choices && e.choices[0];
    if (!c) return;
    const d = c.delta || {};
    if (d.reasoning_content) m.reasoning += d.reasoning_content;
    if (d.content) m.content += d.content;
    if ((d.content || d.tool_calls) && !m.thought) m.thought = Date.now();
    for (const t of d.tool_calls || []) {
      const call = m.calls[t.index] || (m.calls[t.index] = { id: '', name: '', arguments: '' });
      if (t.id) call.id = t.id;
      if (t.function && t.function.name) call.name += t.function.name;
      if (t.function && t.function.arguments) call.arguments += t.function.arguments;
    }
    if (c.finish_reason) m.finish = c.finish_reason;
  }

  async function answer() {
    const control = new AbortController();
    let body;
    try { body = request(); } catch (e) { say(e.message); return; }
    const m = { role: 'assistant', content: '', reasoning: '', calls: [], began: Date.now(), error: '' };
    messages.push(m);
    const view = show(m);
    running = control;
    busy(true);
    view.root.classList.add('busy');
    let due = false;
    const draw = () => {
      due = false;
      const follow = atEnd();
      view.update();
      if (follow) toEnd();
    };
    toEnd();
    try {
      const r = await fetch('v1/chat/completions', {
        method: 'POST', headers: { 'Content-Type': 'application/json', ...headers() }, body: JSON.stringify(body), signal: control.signal,
      });
      if (!r.ok) {
        const text = await r.text();
        let message = `The server answered ${r.status}.`;
        try { message = JSON.parse(text).error.message || message; } catch { /* then the number */ }
        if (r.status === 401) { message = 'The server wants an API key: give it in the settings.'; panel('settings', true); $('key').focus(); }
        throw new Error(message);
      }
      await events(r, (e) => {
        take(m, e);
        if (!due) { due = true; requestAnimationFrame(draw); }
      });
      if (!m.finish) throw new Error('The connection ended before the answer did.');
    } catch (e) {
      if (e.name === 'AbortError') m.finish = 'stopped';
      else m.error = e instanceof TypeError ? 'The server does not answer.' : e.message;
    }
    m.calls = m.calls.filter((c) => c && c.name && c.id);
    if (m.finish === 'stopped' || m.error) m.calls = m.calls.filter((c) => whole(c.arguments));
    m.ended = Date.now();
    running = null;
    busy(false);
    view.root.classList.remove('busy');
    draw();
    keepChat();
    meter();
    say(m.error || (m.finish === 'stopped' ? 'Stopped.' : m.calls.length ? 'The model calls a tool.' : 'Answer complete.'));
  }

  const whole = (json) => {
    try { JSON.parse(json); return true; } catch { return false; }
  };

  // ---- the page ----

  const log = $('log');
  const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  const toEnd = () => { log.scrollTop = log.scrollHeight; };
  const say = (text) => { $('say').textContent = text; };

  function busy(yes) {
    $('send').hidden = yes;
    $('stop').hidden = !yes;
    log.setAttribute('aria-busy', String(yes));
    if (yes) say('Answering.');
  }

  function callView(c) {
    const box = make('div', undefined, 'call');
    const name = make('b', c.name), args = make('pre', pretty(c.arguments));
    box.append(make('span', 'calls ', 'quiet'), name, args);
    box.update = () => { name.textContent = c.name; args.textContent = pretty(c.arguments); };
    return box;
  }

  const pretty = (json) => {
    try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
  };

  // Fields for the results of calls that have none yet; the conversation goes on when all are given.
  function resultForm(m) {
    const form = make('form', undefined, 'results'), fields = m.calls.map((c) => {
      const label = make('label', `Result of ${c.name}`, 'quiet'), area = make('textarea');
      area.rows = 2;
      label.append(area);
      form.append(label);
      return area;
    });
    const send = make('button', 'Send results');
    form.className = 'call';
    form.append(send);
    form.addEventListener('submit', (e) => {
      e.preventDefault();
      if (running) return;
      m.calls.forEach((c, i) => {
        const t = { role: 'tool', content: fields[i].value, tool_call_id: c.id, name: c.name };
        messages.push(t);
        show(t);
      });
      form.remove();
      keepChat();
      answer();
    });
    return form;
  }

  function facts(m) {
    const out = [], u = m.usage;
    if (m.finish === 'stopped') out.push('stopped');
    if (m.finish === 'length') out.push('cut off at the token limit');
    if (u) {
      out.push(`${u.completion_tokens} tokens`);
      const seconds = (m.ended - m.began) / 1000;
      if (seconds > 0) out.push(`${seconds.toFixed(1)} s`);
      const cached = u.prompt_tokens_details && u.prompt_tokens_details.cached_tokens;
      out.push(`prompt ${u.prompt_tokens}${cached ? `, ${cached} from the cache` : ''}`);
    }
    return out.join(' · ');
  }

  function assistant(m) {
    const root = make('article', undefined, 'turn assistant'), body = make('div', undefined, 'body'), after = make('div', undefined, 'after');
    const calls = make('div');
    let fold = null, form = null;
    root.setAttribute('aria-label', 'Answer');
    root.append(body, calls, after);
    const update = () => {
      if (m.reasoning && !fold) {
        fold = make('details', undefined, 'reasoning');
        fold.append(make('summary'), make('div'));
        root.prepend(fold);
      }
      if (fold) {
        const over = m.thought || m.ended, seconds = over ? Math.max(0, (over - m.began) / 1000) : 0;
        fold.firstChild.textContent = over ? `Reasoning, ${seconds.toFixed(1)} s` : 'Reasoning …';
        if (fold.lastChild.textContent !== m.reasoning) fold.lastChild.textContent = m.reasoning;
      }
      render(body, m.content);
      if (calls.childNodes.length > m.calls.length) calls.replaceChildren();
      m.calls.forEach((c, i) => (calls.childNodes[i] ? calls.childNodes[i].update() : calls.append(callView(c))));
      if (!m.ended) return;
      after.replaceChildren();
      if (m.error) after.append(make('span', m.error, 'error'));
      after.append(make('span', facts(m), 'quiet'));
      if (m.content) after.append(copyButton(() => m.content));
      const latest = messages[messages.length - 1] === m;
      if (latest) {
        const again = make('button', 'Again', 'small again');
        again.type = 'button';
        again.addEventListener('click', () => {
          if (running) return;
          messages.pop();
          root.remove();
          answer();
        });
        after.append(again);
      }
      if (m.calls.length && latest && !form) calls.after(form = resultForm(m));
    };
    return { root, update };
  }

  function show(m) {
    $('welcome').hidden = true;
    for (const b of log.querySelectorAll('.again')) b.remove();
    if (m.role === 'assistant') {
      const view = assistant(m);
      log.append(view.root);
      view.update();
      return view;
    }
    const root = make('article', undefined, 'turn ' + m.role), body = make('div', m.content, 'body');
    root.setAttribute('aria-label', m.role === 'tool' ? 'Result of a tool' : 'You');
    if (m.role === 'tool') root.append(make('div', `result of ${m.name}`, 'who'));
    root.append(body);
    log.append(root);
    return { root };
  }

  function meter() {
    const m = messages.findLast((x) => x.usage), used = m ? m.usage.prompt_tokens + m.usage.completion_tokens : 0, bar = $('meter-bar');
    const part = context ? used / context : 0;
    bar.firstChild.style.width = (100 * Math.min(1, part)).toFixed(1) + '%';
    bar.setAttribute('aria-valuenow', part.toFixed(3));
    bar.setAttribute('aria-valuetext', `${used} of ${context} tokens`);
    bar.classList.toggle('full', part > 0.9);
    $('meter-text').textContent = context ? `${used.toLocaleString('en')} of ${context.toLocaleString('en')} tokens` : 'context';
  }

  async function model() {
    try {
      const r = await fetch('v1/models', { headers: headers() });
      if (!r.ok) { $('model').textContent = r.status === 401 ? 'needs an API key' : `error ${r.status}`; return; }
      const first = (await r.json()).data[0];
      $('model').textContent = first.id;
      context = first.context_length;
      meter();
    } catch {
      $('model').textContent = 'the server does not answer';
    }
  }

  function panel(name, open) {
    for (const other of ['settings', 'machine']) {
      const yes = other === name && open;
      $(other).hidden = !yes;
      $('show-' + other).setAttribute('aria-expanded', String(yes));
    }
    machine.open(name === 'machine' && open, headers);
    store('affinity.panel', open && !matchMedia('(max-width: 860px)').matches ? name : '');
  }

  function grow() {
    const t = $('text');
    t.style.height = 'auto';
    t.style.height = t.scrollHeight + 2 + 'px';
  }

  function send() {
    const text = $('text').value;
    if (running || !text.trim()) return;
    // Calls whose results were not given: the model is told so, since every call needs one.
    const last = messages[messages.length - 1];
    if (last && last.role === 'assistant') for (const c of last.calls || []) messages.push({ role: 'tool', content: 'No result was given.', tool_call_id: c.id, name: c.name });
    for (const f of log.querySelectorAll('form.call')) f.remove();
    const m = { role: 'user', content: text };
    messages.push(m);
    show(m);
    $('text').value = '';
    grow();
    keepChat();
    answer();
  }

  const stop = () => { if (running) running.abort(); };

  $('composer').addEventListener('submit', (e) => { e.preventDefault(); send(); });
  $('stop').addEventListener('click', () => { stop(); $('text').focus(); });
  $('text').addEventListener('input', grow);
  $('text').addEventListener('keydown', (e) => {
    if (e.key === 'Enter' && !e.shiftKey && !e.isComposing) { e.preventDefault(); send(); }
  });
  document.addEventListener('keydown', (e) => {
    if (e.key === 'Escape') {
      const open = ['settings', 'machine'].find((n) => !$(n).hidden);
      if (running) stop();
      else if (open) { panel(open, false); $('show-' + open).focus(); }
    } else if (e.key === '/' && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName) && !e.ctrlKey && !e.metaKey) {
      e.preventDefault();
      $('text').focus();
    }
  });
  for (const name of ['settings', 'machine']) $('show-' + name).addEventListener('click', () => {
    const open = $(name).hidden;
    panel(name, open);
    if (open) $(name).querySelector('select, button').focus({ preventScroll: true });
  });
  for (const b of document.querySelectorAll('.close')) b.addEventListener('click', () => { panel(b.dataset.for, false); $('show-' + b.dataset.for).focus(); });
  $('fields').addEventListener('submit', (e) => e.preventDefault());
  $('fields').addEventListener('change', (e) => {
    keepSettings();
    if (e.target.id === 'tools') try { tools(); } catch { /* shown there */ }
    if (e.target.id === 'key') model();
  });
  $('new').addEventListener('click', () => {
    stop();
    messages = [];
    for (const t of log.querySelectorAll('.turn')) t.remove();
    $('welcome').hidden = false;
    keepChat();
    meter();
    $('text').focus();
  });

  loadSettings();
  messages = load('affinity.chat', []).filter((m) => m && typeof m.content === 'string');
  for (const m of messages) {
    if (m.role === 'assistant') {
      m.calls = m.calls || [];
      m.ended = m.ended || m.began || 1; // the page was closed while it came
    }
    show(m);
  }
  toEnd();
  const opened = load('affinity.panel', '');
  if (opened) panel(opened, true);
  model();
  if (!matchMedia('(max-width: 860px)').matches) $('text').focus();
})();
