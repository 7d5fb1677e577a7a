"""Score the answers of capitals.yaml."""


def contains(doc, results):
    return {"acc": doc["answer"].lower() in results[0].lower()}
