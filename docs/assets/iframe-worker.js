// A page from the file system may not start a worker. Read there, without a server, the search
// runs in a hidden frame instead, which takes and gives messages as its worker would.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => setTimeout(() => this.say(data))
      const script = inside.document.createElement("script")
      script.src = new URL(url, document.baseURI).href
      this.ready = new Promise((loaded, failed) => {
        script.onload = loaded
        script.onerror = failed
      })
      this.ready.catch(() => this.onerror?.(new ErrorEvent("error", { message: script.src })))
      inside.document.body.append(script)
    }

    postMessage(data) {
      const message = structuredClone(data)
      const inside = this.frame.contentWindow
      this.ready.then(() => inside?.dispatchEvent(new MessageEvent("message", { data: message })))
    }

    say(data) {
      const event = new MessageEvent("message", { data: structuredClone(data) })
      this.dispatchEvent(event)
      this.onmessage?.(event)
    }

    terminate() {
      this.frame.remove()
    }
  }
}
