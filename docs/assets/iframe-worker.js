// Browsers do not start workers for pages opened from the disk, so the search runs in a hidden frame there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const script = inside.document.createElement("script");
      // Forward messages of the worker to the page; in a window, postMessage would send them to the window itself.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => {
        script.onload = () => resolve(inside);
      });
      script.src = new URL(url, location.href).href;
      inside.document.body.append(script);
    }

    // Messages sent before the script has loaded wait, in order.
    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
