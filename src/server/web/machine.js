// The view of the machine: asks for /snapshot once a second while it is open, and draws it.
'use strict';

const machine = (() => {
  const { make } = markdown;
  const $ = (id) => document.getElementById(id);
  const keep = 120, history = { decode: [], prompt: [] };
  const steps = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/';
  let timer = 0, last = null, headers = () => ({});

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const gib = (n) => (n < 1 << 30 ? (n / (1 << 20)).toFixed(n < 10 << 20 ? 1 : 0) + ' MiB' : (n / (1 << 30)).toFixed(1) + ' GiB');
  const rate = (v) => (v >= 100 ? v.toFixed(0) : v.toFixed(1));

  function bar(to, name, part, text) {
    const track = make('span', undefined, 'track'), fill = make('i');
    fill.style.width = (100 * Math.max(0, Math.min(1, part || 0))).toFixed(1) + '%';
    track.append(fill);
    to.append(make('span', name), track, make('span', text));
  }

  function graph(id, list) {
    const c = $(id), g = c.getContext('2d'), most = Math.max(1, ...list), w = c.width / keep;
    g.clearRect(0, 0, c.width, c.height);
    g.fillStyle = colour('--bar');
    g.fillRect(0, c.height - 1, c.width, 1);
    g.fillStyle = colour('--accent');
    list.forEach((v, i) => {
      const h = Math.round((c.height - 2) * v / most);
      g.fillRect((keep - list.length + i) * w, c.height - 1 - h, Math.max(1, w - 0.5), h);
    });
  }

  function showRate(name, tokens, seconds) {
    const v = seconds > 0 ? tokens / seconds : 0, dd = $(name + '-rate');
    history[name].push(v);
    if (history[name].length > keep) history[name].shift();
    dd.textContent = v ? rate(v) : '–';
    dd.append(make('small', ' tok/s'));
  }

  // One cell an expert: the tier's colour, the stronger the hotter.
  function plane(p) {
    const c = $('plane'), g = c.getContext('2d');
    c.width = p.experts;
    c.height = p.layers;
    c.style.height = Math.max(60, Math.min(260, p.layers * Math.max(3, Math.floor(300 / p.experts)))) + 'px';
    const image = g.createImageData(p.experts, p.layers);
    const tiers = {};
    for (const [k, name] of [['c', '--card'], ['h', '--host'], ['d', '--disk']]) {
      const v = parseInt(colour(name).slice(1), 16);
      tiers[k] = [v >> 16, (v >> 8) & 255, v & 255];
    }
    const back = parseInt(colour('--code').slice(1), 16), base = [back >> 16, (back >> 8) & 255, back & 255];
    for (let i = 0; i < p.tier.length; i++) {
      const t = tiers[p.tier[i]], a = 0.12 + 0.88 * (steps.indexOf(p.heat[i]) / 63) ** 1.5;
      for (let k = 0; k < 3; k++) image.data[4 * i + k] = Math.round(base[k] + (t[k] - base[k]) * a);
      image.data[4 * i + 3] = 255;
    }
    g.putImageData(image, 0, 0);
    const n = (k) => p.tier.split(k).length - 1;
    $('plane-size').textContent = `${p.layers} layers × ${p.experts}, ${p.picks} a token`;
    $('plane').setAttribute('aria-label', `Experts by layer: ${n('c')} on a card, ${n('h')} in host memory, ${n('d')} on disk; brightness is the use`);
  }

  // The card that the model is on: its memory by what it is for.
  function card(list) {
    const d = list[0], box = $('card');
    $('cards').hidden = !d;
    if (!d) return;
    let own = 0;
    box.replaceChildren();
    $('card-name').textContent = `${d.id} ${d.name}, ${d.arch}`;
    for (const [name, n] of Object.entries(d.use)) {
      own += n;
      bar(box, name, n / d.memory, gib(n));
    }
    bar(box, 'others', (d.memory - d.free - own) / d.memory, gib(Math.max(0, d.memory - d.free - own)));
    bar(box, 'free', d.free / d.memory, `${gib(d.free)} of ${gib(d.memory)}`);
    const notes = [`${d.records} passes recorded, ${d.repeated} of ${d.passes} of few rows repeated one`];
    if (d.link.gen) notes.push(`PCIe ${d.link.gen} ×${d.link.width}`);
    if (d.link.rate) notes.push(`${(d.link.rate / 1e9).toFixed(1)} GB/s`);
    $('card-notes').textContent = notes.join(', ');
  }

  function show(s) {
    if (last && s.time > last.time) {
      showRate('decode', s.tokens - last.tokens, s.decode_seconds - last.decode_seconds);
      showRate('prompt', s.prompt_rows - last.prompt_rows, s.prompt_seconds - last.prompt_seconds);
    }
    for (const name of ['decode', 'prompt']) graph(name + '-graph', history[name]);
    const slots = $('slots');
    slots.replaceChildren(make('div', `${s.running} of ${s.slots.length} busy${s.waiting ? `, ${s.waiting} waiting` : ''}`, s.running ? '' : 'idle'));
    for (const v of s.slots) {
      if (v.phase === 'prompt') slots.append(make('div', `prompt, ${v.past} of ${v.prompt} tokens`));
      if (v.phase === 'answer') slots.append(make('div', `answer, ${v.tokens} tokens after ${v.prompt}`));
    }
    const places = $('places');
    places.replaceChildren();
    s.draft.offered.forEach((n, i) => {
      if (n) bar(places, `place ${i + 1}`, s.draft.accepted[i] / n, (100 * s.draft.accepted[i] / n).toFixed(0) + ' %');
    });
    if (!places.childNodes.length) places.append(make('span', s.draft.kind === 'none' ? 'off: the model has no draft' : `${s.draft.kind}: nothing drafted yet`, 'wide'));
    const host = $('host'), used = s.host.memory - s.host.available;
    host.replaceChildren();
    if (last) {
      const busy = (s.host.cpu_seconds - last.host.cpu_seconds) / (s.time - last.time || 1);
      bar(host, 'CPU', busy / s.host.cpus, `${busy.toFixed(1)} of ${s.host.cpus}`);
    }
    bar(host, 'Memory', used / s.host.memory, `${gib(used)} of ${gib(s.host.memory)}`);
    bar(host, 'Program', s.host.resident / s.host.memory, `${gib(s.host.resident)}, peak ${gib(s.host.peak)}`);
    if (s.host.state) bar(host, 'Contexts', s.host.state / s.host.memory, gib(s.host.state));
    card(s.devices);
    plane(s.plane);
    last = s;
  }

  async function tick() {
    if (document.hidden) return;
    const error = $('machine-error');
    try {
      const r = await fetch('snapshot', { headers: headers() });
      if (r.status === 401) throw new Error('The server wants an API key: see Settings.');
      if (!r.ok) throw new Error(`The server answered ${r.status}.`);
      show(await r.json());
      error.hidden = true;
    } catch (e) {
      error.textContent = e instanceof TypeError ? 'The server does not answer.' : e.message;
      error.hidden = false;
    }
  }

  function open(yes, headersOf) {
    clearInterval(timer);
    headers = headersOf;
    if (!yes) return;
    tick();
    timer = setInterval(tick, 1000);
  }

  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { if (last) show(last); });
  return { open };
})();
