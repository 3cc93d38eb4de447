/* An engine in C++ under RTP-LLM's rules: one full group with a prefix cache, least recently used keys evicted first,
 * driven through its standard input and output by the process protocol of docs/oplog.md. It has no forks, no
 * connectors and no prefix tree. The JSON reader is that of the engine in C.
 *
 *   g++ -O2 -Wall -Wextra -o rtp-engine examples/rtp_engine/engine.cc -x c examples/c_engine/json.c
 *   hkv diff --dialect rtp-llm/single --engines cmd:./rtp-engine,numpy --feature core
 */
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <list>
#include <map>
#include <set>
#include <string>
#include <vector>

extern "C" {
#include "../c_engine/json.h"
}

using std::max, std::min, std::string, std::vector;

struct Sequence {
    vector<int32_t> tokens;
    vector<int64_t> keys;  // of whole blocks; the last may be that of a partly filled one
    bool aligned = true;   // it is not
    vector<int> blocks;
};

struct Request {
    vector<Sequence> sequences;
    int length, common, reserve;  // tokens of each; those that all share; those to come in a step
    int width() const { return (int)sequences.size(); }
    int slots() const { return (int)sequences[0].blocks.size(); }
};

struct Item {
    int64_t key;
    int block;
};

static int block_size, num_blocks, reserve_blocks, version = -1;
static bool prefix_reuse;
static std::map<int, int> request_refs, cache_refs;  // of each block that has some
static std::set<int> unheld;                         // blocks that neither has; block 0 is never handed out
static std::list<Item> items;                        // the cache, least recently used first
static std::map<string, Request> requests;

static int blocks_for(int tokens) { return (tokens + block_size - 1) / block_size; }

/* The pool and the cache. */

static void hold(std::map<int, int> &refs, int block) {
    refs[block]++;
    unheld.erase(block);
}

static void release(std::map<int, int> &refs, int block) {
    if (--refs[block] == 0) refs.erase(block);
    if (!request_refs.count(block) && !cache_refs.count(block)) unheld.insert(block);
}

static int available() { return num_blocks - 1 - (int)request_refs.size(); }

static const Item *use(int64_t key) {
    auto found = std::find_if(items.begin(), items.end(), [&](const Item &item) { return item.key == key; });
    if (found == items.end()) return nullptr;
    items.splice(items.end(), items, found);
    return &items.back();
}

static int evict(int least) {
    int count = min(max(least, 0), (int)items.size());
    for (int i = 0; i < count; i++, items.pop_front()) release(cache_refs, items.front().block);
    return count;
}

static void enter(int64_t key, int block) {
    if (use(key) != nullptr) return;  // the block that is there stays
    items.push_back({key, block});
    hold(cache_refs, block);
    version++;
}

/* Keys: one rolling hash over all tokens, read at each block's end. */

static void add_key(Sequence &sequence) {
    size_t start = sequence.keys.size() * block_size, end = min(start + block_size, sequence.tokens.size());
    uint64_t hash = sequence.keys.empty() ? 0 : (uint64_t)sequence.keys.back();
    for (size_t i = start; i < end; i++)
        hash ^= (uint64_t)(int64_t)sequence.tokens[i] + 0x9e3779b97f4a7c15u + (hash << 12) +
                (uint64_t)((int64_t)hash >> 32);
    sequence.keys.push_back((int64_t)hash);
}

static void drop_partial_key(Sequence &sequence) {
    if (!sequence.aligned) sequence.keys.pop_back();
    sequence.aligned = true;
}

/* The partly filled block of a new request has a key too; of one that grew whole blocks alone have. */
static void update_keys(Sequence &sequence, bool is_new) {
    if (is_new && !sequence.keys.empty()) return;
    drop_partial_key(sequence);
    while ((sequence.keys.size() + 1) * block_size <= sequence.tokens.size()) add_key(sequence);
    if (!is_new || sequence.tokens.size() % block_size == 0) return;
    add_key(sequence);
    sequence.aligned = false;
}

/* Blocks of a request. */

static void shorten(Sequence &sequence, int count) {
    for (; (int)sequence.blocks.size() > count; sequence.blocks.pop_back())
        release(request_refs, sequence.blocks.back());
}

static void take_over(Sequence &sequence, int block) {
    sequence.blocks.push_back(block);
    hold(request_refs, block);
}

/* Appends the smallest free blocks up to a number of them, for which others may be evicted; or none. */
static bool lengthen(Sequence &sequence, int count) {
    int missing = count - (int)sequence.blocks.size();
    while (missing > (int)unheld.size())
        if (evict(missing - (int)unheld.size()) == 0) return false;
    for (; missing > 0; missing--) take_over(sequence, *unheld.begin());
    return true;
}

/* Blocks that a first allocation takes: those that all sequences share, and those that each has for itself. */
static int first_need(const Request &request, bool reuse) {
    int shared = blocks_for(min(request.common, request.length + request.reserve));
    int extra = max(blocks_for(request.length + request.reserve) - shared, 0);
    return shared - (reuse ? min(request.slots(), shared) : 0) + request.width() * extra;
}

static string verdict_on(int need, bool now) {
    if (need > 0 && need + reserve_blocks > num_blocks - 1) return "permanent";
    return need > 0 && now && need + reserve_blocks > available() ? "retryable" : "";
}

/* Takes over what is cached under all keys but the last, and adds what the sequences share. */
static bool begin(Request &request, bool cached, bool reuse, int &hits) {
    Sequence &first = request.sequences[0];
    int estimate = reserve_blocks ? first_need(request, reuse) : 0;
    for (hits = 0; cached && prefix_reuse && hits + 1 < (int)first.keys.size(); hits++) {
        const Item *item = use(first.keys[hits]);
        if (item == nullptr) break;
        take_over(first, item->block);
    }
    if (estimate > hits && available() < estimate - hits + reserve_blocks) return false;
    if (!lengthen(first, blocks_for(min(request.common, request.length + request.reserve)))) return false;
    for (int i = 1; i < request.width(); i++)
        for (int block : first.blocks) take_over(request.sequences[i], block);
    return true;
}

static bool grow(Request &request, int tokens) {
    int before = request.slots(), wanted = blocks_for(tokens + request.reserve);
    for (int i = 0; i < request.width() && wanted > before; i++) {
        if (lengthen(request.sequences[i], wanted)) continue;
        for (int j = 0; j < i; j++) shorten(request.sequences[j], before);
        return false;
    }
    return true;
}

/* Operations. Each returns its answer, a line of JSON. */

static string joined(const vector<string> &parts) {
    string text;
    for (const string &part : parts) text += (text.empty() ? "" : ",") + part;
    return text;
}

static string numbers(const vector<int> &values) {
    vector<string> parts;
    for (int value : values) parts.push_back(std::to_string(value));
    return "[" + joined(parts) + "]";
}

static string lists(const Request &request) {
    vector<string> parts;
    for (const Sequence &sequence : request.sequences) parts.push_back("[" + numbers(sequence.blocks) + "]");
    return "[" + joined(parts) + "]";
}

static string do_malloc(Request &request, const Json *operation) {
    bool reuse = json_bool(operation, "reuse", 1), cached = json_bool(operation, "device_cache", 1);
    bool is_new = request.slots() == 0;
    int tokens = (int)json_int(operation, "length", request.length), hits = 0;
    string verdict;
    for (Sequence &sequence : request.sequences) update_keys(sequence, is_new);
    if (!is_new) {
        if (!grow(request, tokens)) verdict = "internal_error";
    } else if ((verdict = verdict_on(first_need(request, reuse), false)).empty()) {
        if (!begin(request, cached, reuse, hits) || !grow(request, tokens)) {
            verdict = verdict_on(first_need(request, reuse), true);  // before anything is given back
            if (verdict.empty()) verdict = "internal_error";
            for (Sequence &sequence : request.sequences) shorten(sequence, 0);
        }
    }
    int reused = verdict.empty() ? hits * block_size : 0;
    return "{\"verdict\":\"" + (verdict.empty() ? "granted" : verdict) + "\",\"reused\":" + std::to_string(reused) +
           ",\"lists\":" + lists(request) + "}";
}

static string do_insert(Request &request) {
    const Sequence &first = request.sequences[0];
    for (Sequence &sequence : request.sequences) drop_partial_key(sequence);
    size_t count = prefix_reuse ? min(first.keys.size(), first.blocks.size()) : 0;
    for (size_t i = 0; i < count; i++) enter(first.keys[i], first.blocks[i]);
    return "null";
}

static string do_peak(const Request &request, const Json *operation) {
    int width = max(request.width(), (int)json_int(operation, "sequences", 0)), now = request.slots();
    int last = blocks_for(request.length + (int)json_int(operation, "remaining", 0) + request.reserve);
    int shared = blocks_for(min(request.common, request.length));
    int copied = request.length % block_size ? width - request.width() : 0;
    int count = now == 0 ? shared + width * max(last - shared, 0) : width * max(last - now, 0) + copied;
    return "{\"count\":" + std::to_string(count) + "}";
}

static void add_tokens(Sequence &sequence, const Json *tokens) {
    for (const Json *token = tokens->child; token != nullptr; token = token->next)
        sequence.tokens.push_back((int32_t)token->number);
}

static void forget_keys(Request &request) {
    for (Sequence &sequence : request.sequences) sequence.keys.clear(), sequence.aligned = true;
}

static string do_request(const string &id, const Json *operation) {
    int width = (int)json_int(operation, "sequences", 1), length = json_get(operation, "tokens")->count;
    int common = width == 1 ? length : length / block_size * block_size;
    Request request{vector<Sequence>(width), length, common, (int)json_int(operation, "reserve", 0)};
    for (Sequence &sequence : request.sequences) add_tokens(sequence, json_get(operation, "tokens"));
    requests[id] = request;
    return "null";
}

static string do_append(Request &request, const Json *tokens) {
    const Json *more = tokens->child;
    for (Sequence &sequence : request.sequences) add_tokens(sequence, more), more = more->next;
    request.length = (int)request.sequences[0].tokens.size();
    if (request.width() == 1) request.common = request.length;
    if (request.slots() == 0) forget_keys(request);
    return "null";
}

static string do_free(Request &request) {
    for (Sequence &sequence : request.sequences) shorten(sequence, 0);
    forget_keys(request);
    return "null";
}

static string references(const std::map<int, int> &refs) {
    vector<string> parts;
    for (auto [block, count] : refs) parts.push_back("\"" + std::to_string(block) + "\":" + std::to_string(count));
    return "{" + joined(parts) + "}";
}

static string do_state() {
    vector<string> held, cached;
    for (const auto &[id, request] : requests)  // names of HKV's need no escapes
        if (request.slots()) held.push_back("\"" + id + "\":" + lists(request));
    for (const Item &item : items) cached.push_back("[" + std::to_string(item.key) + "," + numbers({item.block}) + "]");
    string refs = ",\"request\":" + references(request_refs) + ",\"connector\":{},\"cache\":" + references(cache_refs);
    return "{\"pools\":[{\"free\":" + numbers({unheld.begin(), unheld.end()}) + refs + "}],\"lists\":{" + joined(held) +
           "},\"cached\":[" + joined(cached) + "],\"version\":" + std::to_string(version) + "}";
}

static string perform(const Json *operation) {
    string name = json_text(operation, "op"), id = json_text(operation, "id");
    if (name == "state") return do_state();
    if (name == "evict") return "{\"count\":" + std::to_string(evict((int)json_int(operation, "least", 0))) + "}";
    if (name == "request") return do_request(id, operation);
    auto found = requests.find(id);
    if (found == requests.end()) return "{\"error\":\"no such operation, or no request of this id\"}";
    if (name == "malloc") return do_malloc(found->second, operation);
    if (name == "append") return do_append(found->second, json_get(operation, "tokens"));
    if (name == "insert") return do_insert(found->second);
    if (name == "peak") return do_peak(found->second, operation);
    if (name == "free") return do_free(found->second);
    if (name != "drop") return "{\"error\":\"no such operation\"}";
    requests.erase(found);
    return "null";
}

/* The answer to a header: null if the engine implements the configuration and is ready for it. */
static string start(const Json *header) {
    string feature = json_text(header, "feature");
    if (json_text(header, "dialect") != string("rtp-llm/single")) return "{\"unsupported\":\"not rtp-llm/single\"}";
    if (feature == "fork" || feature == "connector") return "{\"unsupported\":\"no forks, no connectors\"}";
    if (json_bool(header, "prefix_tree", 0)) return "{\"unsupported\":\"no prefix tree\"}";
    const Json *group = json_get(header, "groups")->child;
    block_size = (int)json_int(header, "block_size", json_int(group, "block_size", 1));
    num_blocks = (int)json_get(header, "num_blocks")->child->number;
    reserve_blocks = (int)json_int(header, "reserve_blocks", 0);
    prefix_reuse = json_bool(group, "enable_prefix_reuse", 1);
    for (int block = 1; block < num_blocks; block++) unheld.insert(block);
    return "null";
}

int main() {
    bool started = false;
    for (string line; std::getline(std::cin, line);) {
        Json *value = json_parse(line.c_str());
        string answer = "{\"error\":\"not a JSON object\"}";
        if (value != nullptr && value->type == JSON_OBJECT) answer = started ? perform(value) : start(value);
        started = started || answer == "null";
        std::cout << answer << std::endl;
        json_free(value);
    }
}
