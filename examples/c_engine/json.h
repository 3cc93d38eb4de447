/* A tiny JSON reader: one line of text becomes a tree of values. */
#ifndef JSON_H
#define JSON_H

typedef enum { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonType;

typedef struct Json {
    JsonType type;
    double number;
    char *string;        /* of a string, unescaped */
    char *name;          /* of a member of an object */
    struct Json *child;  /* of an array or object: the first element */
    struct Json *next;   /* the next element of the array or object this one is in */
    int count;           /* of an array or object: elements */
} Json;

/* The value that `text` is, or NULL if it is not JSON. */
Json *json_parse(const char *text);
void json_free(Json *value);

/* The member of that name, or NULL. */
const Json *json_get(const Json *object, const char *name);
/* A member as an integer; `otherwise` where it is absent, null or no number. */
long json_int(const Json *object, const char *name, long otherwise);
int json_bool(const Json *object, const char *name, int otherwise);
const char *json_text(const Json *object, const char *name);

#endif
