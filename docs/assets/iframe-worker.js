// Browsers start no worker for a page that was opened from disk. There, a worker is a frame: its scripts
// are added one by one, its messages go through the window, so that search works without a server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.address = new URL(url, document.baseURI)
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.documentElement.append(this.frame)
      const inside = this.frame.contentWindow
      const add = address =>
        new Promise((loaded, failed) => {
          const script = inside.document.createElement("script")
          script.src = new URL(address, this.address)
          script.onload = loaded
          script.onerror = failed
          inside.document.body.append(script)
        })
      inside.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => add(address)), Promise.resolve())
      inside.postMessage = data => {
        this.dispatchEvent(new MessageEvent("message", { data }))
        this.onmessage?.({ data })
      }
      this.ready = add(this.address)
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
