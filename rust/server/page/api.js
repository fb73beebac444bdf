'use strict';
/* Requests to this server, with the visitor's key. */

const api = (() => {
  const STORED = 'octavo.key';
  let asking = null;

  const key = () => sessionStorage.getItem(STORED);

  /** What the server said in place of an answer. */
  class ApiError extends Error {
    constructor(status, message) {
      super(message);
      this.status = status;
    }
  }

  /** An answer with a status below 400; asks for a key where one is needed. */
  async function request(path, { body, signal } = {}) {
    for (;;) {
      const used = key();
      const headers = { ...(used && { Authorization: `Bearer ${used}` }), ...(body && { 'Content-Type': 'application/json' }) };
      const response = await fetch(path, { method: body ? 'POST' : 'GET', body: body && JSON.stringify(body), headers, signal });
      if (response.ok) return response;
      if (response.status !== 401) throw new ApiError(response.status, await reason(response));
      await askForKey(used);
    }
  }

  async function reason(response) {
    const text = await response.text();
    try {
      return JSON.parse(text).error.message;
    } catch {
      return text.slice(0, 300) || `the server answered ${response.status}`;
    }
  }

  /** Resolves once there is another key than `refused`; many may wait for one dialog. */
  function askForKey(refused) {
    if (key() !== refused) return Promise.resolve();
    asking ??= new Promise((resolve) => {
      const dialog = byId('key-dialog');
      byId('key-error').textContent = refused ? 'The server does not take this key.' : '';
      byId('key').value = '';
      byId('key-button').hidden = false;
      dialog.addEventListener('cancel', (event) => event.preventDefault());
      byId('key-form').onsubmit = () => {
        sessionStorage.setItem(STORED, byId('key').value);
        asking = null;
        resolve();
      };
      if (!dialog.open) dialog.showModal();
    });
    return asking;
  }

  function forgetKey() {
    const old = key();
    sessionStorage.removeItem(STORED);
    return old;
  }

  const json = async (path, options) => (await request(path, options)).json();

  /** Hands each event of a stream to `take`, parsed, until its end. */
  async function stream(path, body, signal, take) {
    const response = await request(path, { body, signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let waiting = '';
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      waiting += value;
      const events = waiting.split('\n\n');
      waiting = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, '');
        if (data === '[DONE]') return;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ApiError(0, parsed.error.message);
        take(parsed);
      }
    }
  }

  return { json, stream, forgetKey };
})();
