// Show the newest page of a run in progress. The server answers 304 while no file of the run has changed.
"use strict";

const SECONDS = 5;
let version = null;

async function update() {
    const headers = version ? { "If-None-Match": version } : {};
    const answer = await fetch(location.pathname, { headers });
    if (answer.status !== 200) {
        return;
    }
    version = answer.headers.get("ETag");
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const open = [...document.querySelectorAll("details")].map(each => each.open);
    for (const name of ["header", "main"]) {
        document.querySelector(name).replaceWith(page.querySelector(name));
    }
    document.title = page.title;
    document.querySelectorAll("details").forEach((each, place) => { each.open = open[place] ?? false; });
}

async function run() {
    try {
        await update();
        document.querySelector(".stale").hidden = true;
    } catch {  // the server was stopped
        document.querySelector(".stale").hidden = false;
    }
    setTimeout(run, 1000 * SECONDS);
}

run();
