/* The fixed texts of the prompt (spec text-and-serving 2.1, 2.2). \1 \2 \3 stand for the names of the call tags. */
#include "text/chat_internal.h"

const char chat__effort_h[] =
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root "
    "cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial "
    "scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n";

const char chat__effort_m[] =
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose "
    "the problem into its most fundamental components, trace every causal chain to its root, and resolve the "
    "underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are "
    "certain that no assumption remains unchecked and no error remains undiscovered.\n\n";

const char chat__tools_head[] =
    "## Tools\n\n"
    "You have access to a set of tools to help answer the user's question. You can invoke tools by writing "
    "a \"<｜DSML｜\1>\" block like the following:\n\n<｜DSML｜\1>\n<｜DSML｜\2 name=\"$TOOL_NAME\">\n"
    "<｜DSML｜\3 name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</｜DSML｜\3>\n...\n"
    "</｜DSML｜\2>\n<｜DSML｜\2 name=\"$TOOL_NAME2\">\n...\n</｜DSML｜\2>\n</｜DSML｜\1>\n\n"
    "String parameters should be specified as is and set `string=\"true\"`. For all other types (numbers, "
    "booleans, arrays, objects), pass the value in JSON format and set `string=\"false\"`.\n\n"
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside "
    "<think>...</think> "
    "BEFORE any tool calls or final response.\n\n"
    "Otherwise, output directly after </think> with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n";

const char chat__tools_tail[] =
    "\n\n"
    "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";

const char chat__format_head[] = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";
