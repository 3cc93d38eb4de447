#include "json.h"

#include <stdlib.h>
#include <string.h>

static Json *parse_value(const char **at);

static void skip_space(const char **at) {
    while (**at == ' ' || **at == '\t' || **at == '\r' || **at == '\n') (*at)++;
}

static Json *new_value(JsonType type) {
    Json *value = calloc(1, sizeof(Json));
    value->type = type;
    return value;
}

static void put_utf8(char **out, unsigned code) {
    if (code < 0x80) {
        *(*out)++ = (char)code;
    } else if (code < 0x800) {
        *(*out)++ = (char)(0xC0 | code >> 6);
        *(*out)++ = (char)(0x80 | (code & 0x3F));
    } else {
        *(*out)++ = (char)(0xE0 | code >> 12);
        *(*out)++ = (char)(0x80 | (code >> 6 & 0x3F));
        *(*out)++ = (char)(0x80 | (code & 0x3F));
    }
}

static char *parse_string(const char **at) {
    if (**at != '"') return NULL;
    const char *end = ++*at;
    while (*end && *end != '"') end += *end == '\\' && end[1] ? 2 : 1;
    if (*end != '"') return NULL;
    char *text = malloc((size_t)(end - *at) * 3 + 1), *out = text;
    for (const char *c = *at; c < end; c++) {
        if (*c != '\\') {
            *out++ = *c;
            continue;
        }
        switch (*++c) {
            case 'n': *out++ = '\n'; break;
            case 't': *out++ = '\t'; break;
            case 'r': *out++ = '\r'; break;
            case 'b': *out++ = '\b'; break;
            case 'f': *out++ = '\f'; break;
            case 'u': {
                char digits[5] = {0};
                strncpy(digits, c + 1, 4);
                put_utf8(&out, (unsigned)strtoul(digits, NULL, 16));
                c += strlen(digits);
                break;
            }
            default: *out++ = *c;
        }
    }
    *out = 0;
    *at = end + 1;
    return text;
}

/* The elements of an array, or the members of an object, up to the closing bracket. */
static Json *parse_elements(const char **at, JsonType type, char close) {
    Json *value = new_value(type), **last = &value->child;
    (*at)++;
    skip_space(at);
    while (**at != close) {
        char *name = NULL;
        if (type == JSON_OBJECT) {
            name = parse_string(at);
            skip_space(at);
            if (name == NULL || *(*at)++ != ':') {
                free(name);
                json_free(value);
                return NULL;
            }
        }
        Json *element = parse_value(at);
        if (element == NULL) {
            free(name);
            json_free(value);
            return NULL;
        }
        element->name = name;
        *last = element;
        last = &element->next;
        value->count++;
        skip_space(at);
        if (**at == ',') {
            (*at)++;
            skip_space(at);
        } else if (**at != close) {
            json_free(value);
            return NULL;
        }
    }
    (*at)++;
    return value;
}

static Json *parse_word(const char **at, const char *word, JsonType type) {
    size_t length = strlen(word);
    if (strncmp(*at, word, length) != 0) return NULL;
    *at += length;
    return new_value(type);
}

static Json *parse_value(const char **at) {
    skip_space(at);
    switch (**at) {
        case '{': return parse_elements(at, JSON_OBJECT, '}');
        case '[': return parse_elements(at, JSON_ARRAY, ']');
        case 'n': return parse_word(at, "null", JSON_NULL);
        case 'f': return parse_word(at, "false", JSON_FALSE);
        case 't': return parse_word(at, "true", JSON_TRUE);
        case '"': {
            char *text = parse_string(at);
            if (text == NULL) return NULL;
            Json *value = new_value(JSON_STRING);
            value->string = text;
            return value;
        }
        default: {
            char *end;
            double number = strtod(*at, &end);
            if (end == *at) return NULL;
            *at = end;
            Json *value = new_value(JSON_NUMBER);
            value->number = number;
            return value;
        }
    }
}

Json *json_parse(const char *text) {
    Json *value = parse_value(&text);
    skip_space(&text);
    if (value != NULL && *text != 0) {
        json_free(value);
        return NULL;
    }
    return value;
}

void json_free(Json *value) {
    while (value != NULL) {
        Json *next = value->next;
        json_free(value->child);
        free(value->string);
        free(value->name);
        free(value);
        value = next;
    }
}

const Json *json_get(const Json *object, const char *name) {
    if (object == NULL || object->type != JSON_OBJECT) return NULL;
    for (const Json *member = object->child; member != NULL; member = member->next)
        if (strcmp(member->name, name) == 0) return member;
    return NULL;
}

long json_int(const Json *object, const char *name, long otherwise) {
    const Json *value = json_get(object, name);
    return value != NULL && value->type == JSON_NUMBER ? (long)value->number : otherwise;
}

int json_bool(const Json *object, const char *name, int otherwise) {
    const Json *value = json_get(object, name);
    if (value == NULL || (value->type != JSON_TRUE && value->type != JSON_FALSE)) return otherwise;
    return value->type == JSON_TRUE;
}

const char *json_text(const Json *object, const char *name) {
    const Json *value = json_get(object, name);
    return value != NULL && value->type == JSON_STRING ? value->string : "";
}
