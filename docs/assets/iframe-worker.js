// A browser starts no worker for a page that is opened from the disk: there the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const script = inside.document.createElement("script");
      // What the worker says to its page; in a window it would say it to itself.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => {
        script.onload = () => resolve(inside);
      });
      script.src = new URL(url, location.href).href;
      inside.document.body.append(script);
    }

    // What is said before the script is there waits for it, in its order.
    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
