// Browsers do not allow workers on pages that are opened from a disk. There the search runs in a
// hidden frame instead, which receives and sends messages like a worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inner.importScripts = (...addresses) => addresses.reduce(
        (before, next) => before.then(() => this.load(next)), Promise.resolve());
      this.ready = this.load(address);
    }

    load(address) {
      return new Promise((done, failed) => {
        const script = this.inner.document.createElement("script");
        script.src = new URL(address, location.href);
        script.onload = done;
        script.onerror = failed;
        this.inner.document.body.append(script);
      });
    }

    postMessage(data) {
      const { MessageEvent } = this.inner;
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
