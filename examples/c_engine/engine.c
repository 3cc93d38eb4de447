#define _POSIX_C_SOURCE 200809L /* getline, strdup */
/* An engine in C: one full-attention group with prefix caching, under vLLM 0.33's rules, driven through its standard
 * input and output by the process protocol of docs/oplog.md. Version 1 of the log format.
 *
 *   gcc -std=c11 -O2 -Wall -Wextra -o engine engine.c pool.c keys.c json.c
 *   hkv diff --engines cmd:./engine,numpy --kinds full_attention --max-groups 1 --version 1 --feature core
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "keys.h"
#include "pool.h"

typedef struct Request {
    char *id;
    int32_t *tokens;
    int num_tokens, num_keys, num_computed, num_granted, running;
    uint8_t (*keys)[KEY_BYTES]; /* key i covers the tokens [0, (i + 1) * block_size) */
    int *row, row_length;
    int registered; /* columns registered or adopted; -1 before either */
    struct Request *next;
} Request;

typedef struct {
    int first, count; /* tokens of a stored event, as a slice of `stored_tokens` */
    int num_blocks;
} Stored;

static Pool pool;
static int block_size, max_model_len, caching;
static Request *requests, **last_request = &requests;
static Request *found_request; /* whose lookup was the last operation, and its hit */
static int found_blocks;
static Stored *stored;
static int32_t *stored_tokens;
static int num_stored, num_stored_tokens;

static int ceil_div(int a, int b) { return (a + b - 1) / b; }
static int smaller(int a, int b) { return a < b ? a : b; }
static int larger(int a, int b) { return a > b ? a : b; }

/* Answers. Each ends its line; main() flushes it. */

static void answer(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
}

static void print_row(const int *row, int count) {
    putchar('[');
    for (int i = 0; i < count; i++) printf("%s%d", i ? "," : "", row[i]);
    putchar(']');
}

static void print_string(const char *text) {
    putchar('"');
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') putchar('\\');
        if ((unsigned char)*text < 0x20)
            printf("\\u%04x", *text);
        else
            putchar(*text);
    }
    putchar('"');
}

/* Requests. */

static Request *find_request(const char *id) {
    for (Request *request = requests; request != NULL; request = request->next)
        if (strcmp(request->id, id) == 0) return request;
    return NULL;
}

static void add_tokens(Request *request, const Json *tokens) {
    int more = tokens == NULL ? 0 : tokens->count;
    request->tokens = realloc(request->tokens, sizeof(int32_t) * (size_t)(request->num_tokens + more + 1));
    for (const Json *token = more ? tokens->child : NULL; token != NULL; token = token->next)
        request->tokens[request->num_tokens++] = (int32_t)token->number;
    int whole = request->num_tokens / block_size;
    request->keys = realloc(request->keys, KEY_BYTES * (size_t)(whole + 1));
    for (; request->num_keys < whole; request->num_keys++) {
        uint8_t root[KEY_BYTES];
        root_key(root);
        const uint8_t *parent = request->num_keys ? request->keys[request->num_keys - 1] : root;
        block_key(request->keys[request->num_keys], parent, request->tokens + request->num_keys * block_size, block_size);
    }
}

static void do_request(const Json *operation) {
    if (find_request(json_text(operation, "id")) != NULL) {
        answer("{\"error\":\"a request of this id is here already\"}");
        return;
    }
    Request *request = calloc(1, sizeof(Request));
    request->id = strdup(json_text(operation, "id"));
    request->registered = -1;
    add_tokens(request, json_get(operation, "tokens"));
    *last_request = request;
    last_request = &request->next;
    answer("null");
}

static void drop_request(Request *request) {
    for (Request **link = &requests; *link != NULL; link = &(*link)->next) {
        if (*link != request) continue;
        *link = request->next;
        if (last_request == &request->next) last_request = link;
        break;
    }
    free(request->id);
    free(request->tokens);
    free(request->keys);
    free(request->row);
    free(request);
}

/* The prefix cache. */

static void do_lookup(Request *request) {
    int columns = caching ? smaller((request->num_tokens - 1) / block_size, request->num_keys) : 0;
    int *row = malloc(sizeof(int) * (size_t)(columns + 1)), count = 0;
    while (count < columns && (row[count] = pool_find(&pool, request->keys[count])) != 0) count++;
    printf("{\"hit\":%d,\"shared_prefix\":0,\"blocks\":[", count * block_size);
    print_row(row, count);
    answer("]}");
    free(row);
    found_request = request;
    found_blocks = count;
}

/* Registers the full blocks among the first `tokens` tokens that were not registered yet. */
static void register_blocks(Request *request, int tokens) {
    int done = larger(request->registered, 0), full = smaller(tokens / block_size, request->num_keys);
    if (!caching || done >= full) return;
    for (int column = done; column < full; column++)
        pool_register(&pool, request->row[column], request->keys[column], (column + 1) * block_size);
    request->registered = full;
    int count = (full - done) * block_size;
    stored = realloc(stored, sizeof(Stored) * (size_t)(num_stored + 1));
    stored[num_stored++] = (Stored){num_stored_tokens, count, full - done};
    stored_tokens = realloc(stored_tokens, sizeof(int32_t) * (size_t)(num_stored_tokens + count));
    memcpy(stored_tokens + num_stored_tokens, request->tokens + done * block_size, sizeof(int32_t) * (size_t)count);
    num_stored_tokens += count;
}

static void do_evict(const Json *operation) {
    const Json *blocks = json_get(operation, "blocks");
    for (const Json *block = blocks ? blocks->child : NULL; block != NULL; block = block->next)
        if (block->number >= 0 && block->number < pool.num_blocks) pool_drop_key(&pool, (int)block->number);
    answer("null");
}

static void do_reset(void) {
    int idle = pool.num_free == pool.num_blocks - 1;
    for (int block = 0; idle && block < pool.num_blocks; block++) pool.blocks[block].cached = 0;
    answer("{\"ok\":%s}", idle ? "true" : "false");
}

/* Blocks. */

/* Blocks of the free queue that room for `tokens` tokens costs, with `hit` blocks of the last lookup adopted. */
static int cost(const Request *request, int tokens, int hit) {
    int wanted = ceil_div(tokens, block_size);
    if (request->registered >= 0) return larger(wanted - request->row_length, 0);
    int new = larger(wanted - hit - request->row_length, 0);
    for (int column = 0; column < hit; column++)
        if (pool.blocks[pool_find(&pool, request->keys[column])].refs == 0) new++;
    return new;
}

static void grow(Request *request, int tokens) {
    int missing = ceil_div(tokens, block_size) - request->row_length;
    if (missing <= 0) return;
    request->row = realloc(request->row, sizeof(int) * (size_t)(request->row_length + missing));
    pool_take(&pool, missing, request->row + request->row_length);
    request->row_length += missing;
}

static void adopt(Request *request, int hit) {
    request->row = realloc(request->row, sizeof(int) * (size_t)(hit + 1));
    for (int column = 0; column < hit; column++) {
        request->row[column] = pool_find(&pool, request->keys[column]);
        pool_touch(&pool, request->row[column]);
    }
    request->row_length = request->registered = hit;
}

static void do_allocate(Request *request, const Json *operation) {
    int hit = (int)json_int(operation, "hit", 0), external = (int)json_int(operation, "external", 0);
    int hit_blocks = hit / block_size;
    if (hit && (found_request != request || found_blocks != hit_blocks)) {
        answer("{\"error\":\"no lookup of this request just found this hit\"}");
        return;
    }
    int start = smaller(request->num_computed + hit + external, max_model_len);
    int end = start + (int)json_int(operation, "new", 0);
    int slots = smaller(end + (int)json_int(operation, "lookahead", 0), max_model_len);
    int refused = cost(request, slots, hit_blocks) > pool.num_free - (int)json_int(operation, "reserved", 0);
    if (json_bool(operation, "must_fit", 0) && cost(request, request->num_tokens, hit_blocks) > pool.num_free) refused = 1;
    if (refused) {
        answer("{\"blocks\":null}");
        return;
    }
    if (request->registered < 0 && (hit || external)) {
        adopt(request, hit_blocks);
        grow(request, start);
    }
    int before = request->row_length;
    grow(request, slots);
    request->running = 1;
    request->num_granted = end;
    if (!json_bool(operation, "delay", 0)) register_blocks(request, smaller(end, request->num_tokens));
    printf("{\"blocks\":[");
    print_row(request->row + before, request->row_length - before);
    answer("]}");
}

static void do_free(Request *request) {
    pool_release_row(&pool, request->row, request->row_length);
    request->row_length = request->num_computed = request->num_granted = request->running = 0;
    request->registered = -1;
    answer("null");
}

/* What can be seen. */

static void do_events(void) {
    putchar('[');
    for (int i = 0; i < num_stored; i++) {
        printf("%s{\"type\":\"stored\",\"group\":0,\"num_blocks\":%d,\"block_size\":%d,\"tokens\":", i ? "," : "",
               stored[i].num_blocks, block_size);
        print_row((const int *)stored_tokens + stored[i].first, stored[i].count);
        putchar('}');
    }
    for (long i = 0; i < pool.removed; i++)
        printf("%s{\"type\":\"removed\",\"group\":0,\"num_blocks\":1}", i || num_stored ? "," : "");
    answer("]");
    num_stored = num_stored_tokens = 0;
    pool.removed = 0;
}

static void do_state(void) {
    const char *comma = "";
    printf("{\"free\":[");
    for (int block = pool.blocks[0].next; block != 0; block = pool.blocks[block].next, comma = ",")
        printf("%s%d", comma, block);
    printf("],\"refs\":{");
    comma = "";
    for (int block = 1; block < pool.num_blocks; block++)
        if (pool.blocks[block].refs) printf("%s\"%d\":%d", comma, block, pool.blocks[block].refs), comma = ",";
    printf("},\"rows\":{");
    comma = "";
    for (const Request *request = requests; request != NULL; request = request->next) {
        if (request->row_length == 0) continue;
        printf("%s", comma), comma = ",";
        print_string(request->id);
        printf(":[");
        print_row(request->row, request->row_length);
        putchar(']');
    }
    printf("},\"cached\":{");
    comma = "";
    for (int block = 1; block < pool.num_blocks; block++) {
        if (!pool.blocks[block].cached) continue;
        printf("%s\"%d\":[0,%d,\"", comma, block, pool.blocks[block].tokens), comma = ",";
        for (int i = 0; i < 8; i++) printf("%02x", pool.blocks[block].key[i]);
        printf("\"]");
    }
    answer("}}");
}

/* The protocol: a header, then one operation a line; one answer a line. Another header may come at any time. */

/* Why this engine does not implement a configuration, or NULL if it does. */
static const char *unsupported(const Json *header) {
    const Json *groups = json_get(header, "groups"), *retention = json_get(header, "retention_interval");
    if (json_int(header, "oplog", 0) != 1) return "only version 1 of the log format";
    if (strcmp(json_text(header, "dialect"), "vllm-0.33") != 0) return "only the dialect vllm-0.33";
    if (groups == NULL || groups->count != 1) return "only one group";
    if (strcmp(json_text(groups->child, "kind"), "full_attention") != 0) return "only full attention";
    if (strcmp(json_text(header, "hash"), "sha256_cbor") != 0) return "only the hash sha256_cbor";
    if (json_int(header, "hash_block_size", 0) != json_int(groups->child, "block_size", 0)) return "only whole blocks";
    if (json_int(header, "hash_lookahead", 0) != 0) return "no hash lookahead";
    if (json_bool(header, "eagle", 0)) return "no EAGLE rule";
    if (retention != NULL && retention->type != JSON_NULL) return "no retention interval";
    if (json_int(header, "context_parallel", 1) != 1) return "no context parallelism";
    return NULL;
}

/* An empty cache of a configuration; of the one before nothing is left. */
static void start(const Json *header) {
    while (requests != NULL) drop_request(requests);
    num_stored = num_stored_tokens = 0;
    found_request = NULL;
    block_size = (int)json_int(json_get(header, "groups")->child, "block_size", 1);
    max_model_len = (int)json_int(header, "max_model_len", 0);
    caching = json_bool(header, "caching", 1);
    pool_init(&pool, (int)json_int(header, "num_blocks", 1));
}

/* Performs an operation on one request. */
static void perform_on(Request *request, const char *name, const Json *operation) {
    if (strcmp(name, "lookup") == 0) {
        do_lookup(request);
    } else if (strcmp(name, "allocate") == 0) {
        do_allocate(request, operation);
    } else if (strcmp(name, "advance") == 0) {
        request->num_computed += (int)json_int(operation, "tokens", 0);
        answer("null");
    } else if (strcmp(name, "append") == 0) {
        add_tokens(request, json_get(operation, "tokens"));
        answer("null");
    } else if (strcmp(name, "commit") == 0) {
        register_blocks(request, (int)json_int(operation, "tokens", 0));
        answer("null");
    } else if (strcmp(name, "free") == 0) {
        do_free(request);
    } else if (strcmp(name, "drop") == 0) {
        drop_request(request);
        answer("null");
    } else {
        answer("{\"error\":\"no such operation\"}");
    }
}

static void perform(const Json *operation) {
    const char *name = json_text(operation, "op");
    if (strcmp(name, "step") == 0) {
        answer("null");
    } else if (strcmp(name, "request") == 0) {
        do_request(operation);
    } else if (strcmp(name, "evict") == 0) {
        do_evict(operation);
    } else if (strcmp(name, "copies") == 0) {
        answer("[]"); /* nothing is ever shared and written to */
    } else if (strcmp(name, "reset") == 0) {
        do_reset();
    } else if (strcmp(name, "events") == 0) {
        do_events();
    } else if (strcmp(name, "state") == 0) {
        do_state();
    } else {
        Request *request = find_request(json_text(operation, "id"));
        if (request == NULL)
            answer("{\"error\":\"no such operation, or no request of this id\"}");
        else
            perform_on(request, name, operation);
    }
}

int main(void) {
    char *line = NULL;
    size_t room = 0;
    while (getline(&line, &room, stdin) > 0) {
        Json *value = json_parse(line);
        if (value == NULL || value->type != JSON_OBJECT) {
            answer("{\"error\":\"not a JSON object\"}");
        } else if (pool.blocks != NULL && json_get(value, "op") != NULL) {
            perform(value);
        } else if (unsupported(value) != NULL) {
            answer("{\"unsupported\":\"%s\",\"again\":true}", unsupported(value));
        } else {
            start(value);
            answer("{\"again\":true}");
        }
        fflush(stdout);
        json_free(value);
    }
    free(line);
    return 0;
}
