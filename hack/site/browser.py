"""Opens every page of the site in Chromium, wide and light, narrow and dark, and searches."""

import functools
import glob
import http.server
import os
import sys
import threading

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

site = sys.argv[1]


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site))
threading.Thread(target=server.serve_forever, daemon=True).start()
base = "http://127.0.0.1:%d/" % server.server_port

options = webdriver.ChromeOptions()
for argument in "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage":
    options.add_argument(argument)
browser = webdriver.Chrome(service=Service("/usr/bin/chromedriver"), options=options)
failures = []
pages = [os.path.relpath(f, site)[: -len("index.html")] for f in glob.glob(site + "/**/index.html", recursive=True)]
try:
    for width, scheme in (1300, "light"), (400, "dark"):
        browser.set_window_size(width, 1200)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        for page in sorted(pages):
            browser.get(base + page)
            where = "/%s, %d pixels wide, %s: " % (page, width, scheme)
            wider = browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
            if wider > 0:
                failures.append(where + "%d pixels wider than the window" % wider)
            for image in browser.execute_script("return [...document.images].filter(i => !i.naturalWidth).map(i => i.src)"):
                failures.append(where + "image does not load: " + image)
            for entry in browser.get_log("browser"):
                if entry["level"] == "SEVERE":
                    failures.append(where + entry["message"])
    browser.set_window_size(1300, 1200)
    browser.get(base)
    wait = WebDriverWait(browser, 60)
    browser.find_element(By.PARTIAL_LINK_TEXT, "Search").click()
    query = browser.find_element(By.ID, "mkdocs-search-query")
    wait.until(lambda _: query.is_displayed())
    query.send_keys("drain-deadline")

    def found(browser):
        query.send_keys(" ")  # the page ignores what was typed before its index was read
        return browser.find_elements(By.CSS_SELECTOR, "#mkdocs-search-results article")

    wait.until(found)
finally:
    browser.quit()
print("\n".join(failures) or "%d pages and the search work" % len(pages))
sys.exit(bool(failures) or not pages)
