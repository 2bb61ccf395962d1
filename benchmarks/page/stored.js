// The data of the dashboard lies in data.js: a page opened from a folder may not read other files of it.
(function ($) {
  "use strict";
  $.ajaxTransport("+*", function (options) {
    var path = decodeURIComponent(options.url.split("?")[0]);
    if (/^([a-z]+:)?\/\//i.test(path)) {
      return undefined;
    }
    // Graphs are asked for on every machine, and not every machine has measured every benchmark.
    var known = Object.prototype.hasOwnProperty.call(window.STORED, path);
    return {
      send: function (headers, complete) {
        setTimeout(function () {
          if (known) {
            complete(200, "OK", { text: window.STORED[path] });
          } else {
            complete(404, "Not Found");
          }
        }, 0);
      },
      abort: function () {},
    };
  });
})(jQuery);
